"""The cluster of one seed: machines, gateways, clients, and what is told of all of it."""

import asyncio
import hashlib
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray.exceptions import RayError

from cluster.control.members import RayMembers
from cluster.gateway.admission import Admission
from cluster.gateway.gateway import ClusterGateway
from core.answer import Delta, Finished, Piece
from core.config import TINY_MODEL, TandemConfig, load
from core.errors import Draining, TandemError
from core.membership import RankSpec
from core.request import Request, SamplingParams, Unchecked
from kv_transfer import channel
from runtime import parts, shell, watch
from runtime.gang import hub
from tests.sim import chance
from tests.sim.fake_ray import FakeRay, Machine
from tests.sim.lockstep import Gangs
from tests.sim.loop import Process, SimLoop
from tests.sim.model import Loads, expected
from tests.sim.net import Net
from tests.sim.threads import Threads
from tests.sim.wire import Wires
from text.tokenizer import Tokenizer

SETS = (
    *("kv.page_size=4", "kv.num_pages=60", "decode.max_rows=4", "model.max_model_len=200"),
    *("speculation.drafter=none", "speculation.measure_at_start=false", "model.kernels=plain"),
    *("kv_transfer.lease_s=8", "kv_transfer.staging_bytes=65536", "control.stuck_s=3"),
    *("control.start_s=30", "prefill.max_batch_tokens=64", "server.max_queued=64"),
)
BUILDERS = "colocated_node.rank", "decode_node.service.rank", "prefill_node.rank"
for _name in BUILDERS:
    import_module(_name)  # not in the middle of a seed
GATEWAYS = {"g0": "m0", "g1": "away"}
"""And the machines that they run on."""
log = logging.getLogger(__name__)


class Wrong(Exception):
    """Something that may not be."""


@cache
def checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tandem-sim-"))
    config = json.loads((TINY_MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 256}
    config |= {"kv_lora_rank": 8, "qk_rope_head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(TINY_MODEL / "tokenizer.json", folder)
    return folder


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(checkpoint())


@cache
def configured(*sets: str) -> TandemConfig:
    return load(None, [f"model.path={checkpoint()}", *SETS, *sets])


@dataclass(eq=False)
class Gateway:
    """One, from life to life."""

    name: str
    process: Process
    admission: Admission | None = None
    gateway: ClusterGateway | None = None


@dataclass(eq=False)
class Client:
    """One request and its answer so far; resumed elsewhere when its stream breaks."""

    number: int
    request: Request
    right: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    is_done: bool = False
    is_aborted: bool = False
    begun_at: float = 0.0
    num_tries: int = 0
    refused: str = ""


class World:
    """Built and run inside ``patched``. ``trace`` is a hash of all that happened."""

    def __init__(self, seed: int, *sets: str) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.loop = SimLoop()
        self.threads = Threads(self.loop)
        self.net = Net(self.loop, random.Random(self.draw.random()))
        self.loop.threads, self.loop.net = self.threads, self.net
        self.wires = Wires(self.net, self.threads, random.Random(self.draw.random()))
        drawn = random.Random(self.draw.random())
        self.ray = FakeRay(self.loop, self.net, self.threads, drawn, self.told)
        self.lives: set[str] = set()
        self.gangs = Gangs(self.net, self.joined)
        self.config = configured(*sets)
        self.loads = Loads(checkpoint(), random.Random(self.draw.random()))
        self.gateways: list[Gateway] = []
        self.clients: list[Client] = []
        self.failures: list[str] = []
        self.events: list[str] = []
        self.num_told: dict[str, int] = {}
        self._trace = hashlib.sha256()
        self.keeps_log = False
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-sim-run-"))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """In here the machine below the cluster is this world's."""
        changes: list[Any] = [
            patch.object(parts, "load_model", self.loads),
            patch.object(parts, "Member", self.gangs.member),
            patch.object(hub, "Hub", self.gangs.hub),
            patch.object(watch, "waited_for_cpu_s", lambda thread_id: 0.0),
            patch.object(shell, "_stderr_path", lambda: str(self.folder / "log")),
            patch.object(channel, "store_server", self.wires.store_server),
            patch.object(channel, "store_client", self.wires.store_client),
            patch.object(channel, "GlooBackend", self.wires.backend),
            *self.ray.patched(),
        ]
        with ExitStack() as stack:
            stack.enter_context(self.threads.patched())
            stack.enter_context(chance.patched(random.Random(self.draw.random())))
            for change in changes:
                stack.enter_context(change)
            try:
                yield
            finally:
                self.threads.end()
                asyncio.events._set_running_loop(None)
                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()[:16]

    def told(self, what: str, *more: Any) -> None:
        """Something happened."""
        self.num_told[what] = self.num_told.get(what, 0) + 1
        line = " ".join([f"{self.loop.time():.6f}", what, *map(str, more)])
        self._trace.update(line.encode())
        if self.keeps_log:
            self.events.append(line)
            print(line, flush=True)

    def wrong(self, text: str) -> None:
        """Something that may not be happened."""
        self.told("WRONG", text)
        self.failures.append(f"{self.loop.time():.3f}: {text}")
        self.loop.stop()

    def joined(self, spec: RankSpec) -> None:
        if spec.life in self.lives:
            self.wrong(f"{spec.life} is joined twice")
        self.lives.add(spec.life)
        self.told("joined", spec.life)

    # Machines and gateways.

    def add_machine(self, num_cpus: float) -> Machine:
        number = len(self.ray.machines)
        machine = Machine(f"m{number}", f"10.0.0.{number + 1}", num_cpus)
        self.ray.machines.append(machine)
        return machine

    def begin_gateway(self, name: str) -> Gateway:
        process = Process(self.loop, name, GATEWAYS[name])
        gateway = Gateway(name, process)
        self.gateways = [one for one in self.gateways if one.name != name] + [gateway]
        self.told("begin", name)
        process.start(self._serve(gateway))
        return gateway

    async def _serve(self, gateway: Gateway) -> None:
        while True:
            try:
                members = await RayMembers.attach(self.config)
                await members.started(lambda text: None)
                break
            except (TandemError, RayError, ValueError) as error:
                self.told("not started", gateway.name, error)
                await asyncio.sleep(1.0)
        gateway.admission = admission = Admission(self.config)
        gateway.gateway = made = ClusterGateway(self.config, tokenizer(), members)
        await made.fleet.ready()
        await admission.attach(made)
        self.told("serving", gateway.name)

    # Clients.

    def make_client(self, number: int) -> Client:
        draw = self.draw
        prompt = tuple(draw.randrange(3, 90) for _ in range(draw.randint(4, 60)))
        sampling = SamplingParams(
            max_tokens=draw.choice((1, 2, 4, 8, 16, 24)),
            temperature=draw.choice((0.0, 0.0, 0.0, 0.8)),
            seed=draw.randrange(1 << 30),
            ignore_eos=True,
        )
        request = Request(f"r{number}", prompt, sampling=sampling)
        right = expected(request, self.config.model.max_model_len or 0, ())
        client = Client(number, request, right)
        self.clients.append(client)
        return client

    def begin_client(self, client: Client) -> None:
        process = Process(self.loop, f"client-{client.number}")
        client.begun_at = self.loop.time()
        process.start(self._ask(client, process))

    async def _ask(self, client: Client, process: Process) -> None:
        """As the typed client does it: another gateway, from where it was, when a stream breaks."""
        while not client.is_done:
            ready = [one for one in self.gateways if one.admission and one.process.is_alive]
            if not ready:
                await asyncio.sleep(0.5)
                continue
            gateway = self.draw.choice(ready)
            client.num_tries += 1
            client.refused = await self._stream(client, process, gateway)
            if not client.is_done:
                self.told("again", client.number, client.refused)
                await asyncio.sleep(self.draw.uniform(0.2, 1.0))

    async def _stream(self, client: Client, process: Process, gateway: Gateway) -> str:
        """One try; why it broke."""
        over: asyncio.Future[str] = self.loop.create_future()
        base = client.request
        asked = Unchecked(
            base.prompt_ids,
            base.request_id,
            sampling=base.sampling,
            resume_token_ids=tuple(client.token_ids),
        )
        here, nonce = process, f"stream-{client.number}"

        def end(reason: str) -> None:
            if not over.done():
                over.set_result(reason)

        def take(piece: Piece) -> None:
            if not over.done():
                self._take(client, piece)

        async def write(piece: Piece) -> None:
            here.call(take, piece, after_s=0.001)

        async def serve() -> None:
            assert gateway.admission is not None
            try:
                await gateway.admission.answer(asked, write, nonce)
                here.call(end, "", after_s=0.001)
            except (TandemError, Draining, ValueError) as error:
                here.call(end, f"{type(error).__name__}: {error}", after_s=0.001)

        gateway.process.on_death.append(lambda: here.call(end, "gateway died", after_s=0.01))
        gateway.process.call(lambda: gateway.process.start(serve()), after_s=0.001)
        return await over

    def _take(self, client: Client, piece: Piece) -> None:
        if isinstance(piece, Delta):
            client.token_ids += piece.token_ids
            if tuple(client.token_ids) != client.right[: len(client.token_ids)]:
                self.wrong(
                    f"client {client.number} got {client.token_ids}, right is {client.right}"
                )
            self.told("tokens", client.number, *piece.token_ids)
        elif isinstance(piece, Finished):
            if tuple(client.token_ids) != client.right:
                found = len(client.token_ids), len(client.right), piece.finish_reason
                self.wrong(f"client {client.number} ended: {found}")
            client.is_done = True
            self.told("done", client.number, piece.finish_reason)


def nothing(*_: Any) -> None:
    pass


Done = Callable[[], bool]
__all__ = ["Client", "Gateway", "World", "Wrong", "configured", "replace"]
