"""Run the commands of deploy/README.md in order, as a reader who reads nothing else would.

A command that this module does not know is an error, so no command is skipped silently.
"""

import re
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.deployed import DEPLOY, Deployed, deployed
from tests.image.build import build
from tests.image.containers import inside
from tests.image.scene import CLIENT, Scene, scene
from tests.kubelet import hosts_of
from tests.pods import lead

README = DEPLOY / "README.md"
LOCAL = "127.0.0.1:50051"
FORWARD = """
import asyncio, sys
async def copy(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
async def forward(reader, writer):
    there = await asyncio.open_connection(sys.argv[1], 50051)
    await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
async def main():
    async with await asyncio.start_server(forward, "127.0.0.1", 50051) as server:
        await server.serve_forever()
asyncio.run(main())
"""


def commands(heading: str) -> list[str]:
    """Return the commands in the blocks below this heading, up to the next heading."""
    _, _, rest = README.read_text().partition(f"\n## {heading}\n")
    assert rest, heading
    section = rest.partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", section, flags=re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    told = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in told if line]


@dataclass
class Walk:
    """``texts`` are the received texts. ``change`` is added to the config of later deployments."""

    say: Callable[[str], None]
    texts: list[str] = field(default_factory=list)
    image: str = ""
    change: str = ""
    _scene: Scene | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def scene(self) -> Scene:
        assert self._scene is not None, "nothing is applied yet"
        return self._scene

    def through(self, heading: str) -> None:
        for command in commands(heading):
            self._do(command)

    def _do(self, command: str) -> None:
        self.say(command)
        for pattern, act in DOES.items():
            if match := re.fullmatch(pattern, command):
                return act(self, *match.groups())
        raise AssertionError(f"{README.name}: nobody here knows {command!r}")

    def build(self, arguments: str) -> None:
        words = shlex.split(arguments)
        self.image = words[words.index("-t") + 1]
        build(words)

    def elsewhere(self, *_: str) -> None:
        """Commands of Kubernetes or the operator, which are not run here."""

    def apply(self, folder: str) -> None:
        it = deployed(folder)
        it.config_map["data"]["tandem.yaml"] += self.change
        if self._scene is None:
            self._scene = self._stack.enter_context(scene(it, self.image))
            self._scene.begin()
        else:
            self._roll(it)

    def _roll(self, it: Deployed) -> None:
        """Replace the gateways by changed ones: a new one is ready before an old one leaves."""
        self.scene.it = it
        for old in list(self.scene.gateways):
            new = self.scene.add_gateway()
            self.scene.wait_ready(new)
            self.scene.there[old].terminate()
            assert self.scene.gateways.pop(old).wait(75) == 0
        lead(self.scene.there, hosts_of(it, door=next(iter(self.scene.gateways))))

    def provisioned(self) -> None:
        self.scene.wait_provisioned()

    def until_ready(self) -> None:
        for name in self.scene.gateways:
            self.scene.wait_ready(name)

    def in_gateway(self, command: str) -> None:
        self._took(inside(self.scene.there[next(iter(self.scene.gateways))], shlex.split(command)))

    def in_head(self, command: str) -> None:
        self.say(inside(self.scene.there["head"], shlex.split(command)).strip())

    def forward(self) -> None:
        pod = self.scene.there[next(iter(self.scene.gateways))]
        self.scene.there[CLIENT].run(("python", "-c", FORWARD, pod.address))

    def ask(self, command: str) -> None:
        self._took(self.scene.in_client("tandem", *shlex.split(command)))

    def _took(self, text: str) -> None:
        self.texts.append(text)
        self.say(text.strip())


DOES: dict[str, Callable[..., None]] = {
    r"docker build (.*)": Walk.build,
    r"(?:helm|kind) .*": Walk.elsewhere,
    r"kubectl (?:create namespace|config set-context) .*": Walk.elsewhere,
    r"kubectl apply -k deploy/(\S+)": Walk.apply,
    r"kubectl wait --for condition=RayClusterProvisioned raycluster/tandem .*": Walk.provisioned,
    r"kubectl logs --follow deployment/tandem-gateway": Walk.until_ready,
    r"kubectl exec deployment/tandem-gateway -- (.*)": Walk.in_gateway,
    r"kubectl exec service/tandem-head-svc -- (.*)": Walk.in_head,
    r"kubectl port-forward service/tandem 50051 &": Walk.forward,
    r"tandem (generate .*|status .*)": Walk.ask,
}
