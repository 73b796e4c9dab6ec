"""The pods of one ``kubectl apply -k``: probed as by kubelets, isolated by its policies."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.deployed import Deployed, container
from tests.image.containers import Image, inside, most_memory_bytes
from tests.kubelet import begin_ray, hosts_of, start_gateway
from tests.kustomize import Manifest
from tests.pods import Pod, RunningSequence, Tree, pods
from tests.policies import Peer, enforce
from tests.waiting import wait_until

PROBES = {
    "52365/api/local_raylet_healthz": ("head", "worker"),
    "8265/api/gcs_healthz": ("head",),
}
"""Probes that the operator runs in pods of Ray, by wget, and the kinds of pods for each."""
PROBE = "wget --tries 1 -T 5 -q -O- http://localhost:{} | grep success"
CLIENT, MONITOR = "client", "monitor"
MOST_START_S = 900.0


@dataclass
class Scene:
    """A deployment in pods.

    ``there`` has, by name, the pods of the head, of each worker group and of the gateways. A client
    outside and a monitor in its namespace run on this machine's files instead of the image.
    """

    it: Deployed
    there: dict[str, Pod]
    gateways: dict[str, RunningSequence] = field(default_factory=dict)
    num_gateways: int = 0
    began_at: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Start all pods, and enforce the policies between them."""
        for name in self._ray():
            begin_ray(self.there[name], self.it, self._group(name))
        for _ in range(self.it.gateway["spec"]["replicas"]):
            self.add_gateway()
        self._enforce()

    def add_gateway(self) -> str:
        name = f"gateway-{self.num_gateways}"
        self.num_gateways += 1
        self.gateways[name] = start_gateway(self.there[name], self.it)
        return name

    def wait_provisioned(self) -> None:
        """Wait until every pod of Ray is healthy."""
        wait_until(lambda: all(map(self._is_well, self._ray())), "probes", MOST_START_S)

    def wait_ready(self, name: str) -> None:
        """Wait until a gateway is ready, probed from outside its pod like by a kubelet."""
        wait_until(lambda: self._asked(name, "readyz"), self.there[name].log(), MOST_START_S)

    def memory(self) -> dict[str, tuple[int, str]]:
        """Return the peak memory of each container, and its limit."""
        limits = {
            name: container(self._spec(name))["resources"]["limits"] for name in self.running()
        }
        return {
            name: (most_memory_bytes(self.there[name]), one["memory"])
            for name, one in limits.items()
        }

    def in_client(self, *command: str) -> str:
        process = self.there[CLIENT].run(command)
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, self.there[CLIENT].log()[-3000:]
        return text

    def _ray(self) -> list[str]:
        return ["head", *machines(self.it)]

    def running(self) -> list[str]:
        return [*self._ray(), *self.gateways]

    def _group(self, name: str) -> Manifest:
        head = self.it.cluster["spec"]["headGroupSpec"]
        return head if name == "head" else self.it.groups[name.rpartition("-")[0]]

    def _spec(self, name: str) -> Manifest:
        if name.startswith("gateway"):
            return self.it.gateway_pod
        return self._group(name)["template"]["spec"]

    def _is_well(self, name: str) -> bool:
        kind, pod = "head" if name == "head" else "worker", self.there[name]
        assert pod.processes[-1].poll() is None, pod.log()[-3000:]
        asked = [PROBE.format(path) for path, kinds in PROBES.items() if kind in kinds]
        try:
            inside(pod, ("bash", "-c", " && ".join(asked)))
        except AssertionError:
            return False
        return True

    def _asked(self, name: str, path: str) -> bool:
        pod = self.there[name]
        assert self.gateways[name].poll() is None, pod.log()[-3000:]
        address = f"http://{pod.address}:9400/{path}"
        command = ("ip", "netns", "exec", pod.switch, "curl", "--fail", "--silent", address)
        return subprocess.run(command, capture_output=True).returncode == 0

    def told(self) -> dict[str, tuple[dict[str, str], Manifest]]:
        """Return labels and spec of each pod of the cluster, including those that may start
        later."""
        of = dict(zip(("head", *self.it.groups, "gateway"), self.it.labels(), strict=True))
        own = [name for name in self.there if name not in (CLIENT, MONITOR)]
        kinds = {name: name if name == "head" else name.rpartition("-")[0] for name in own}
        return {name: (of[kind], self._spec(name)) for name, kind in kinds.items()}

    def _enforce(self) -> None:
        peers = []
        for name, (labels, spec) in self.told().items():
            ports = {one["name"]: one["containerPort"] for one in container(spec)["ports"]}
            peers.append(Peer(self.there[name], labels, ports=ports))
        spaces = {CLIENT: "elsewhere", MONITOR: "monitoring"}
        peers += [Peer(self.there[name], namespace=space) for name, space in spaces.items()]
        enforce(self.there["head"].switch, self.it.policies, peers)


def machines(it: Deployed) -> list[str]:
    return [
        f"{group['groupName']}-{index}"
        for group in it.groups.values()
        for index in range(group["replicas"] * group["numOfHosts"])
    ]


@contextmanager
def scene(it: Deployed, image: str) -> Iterator[Scene]:
    """Yield pods in which nothing is started. Includes spare pods for replacement gateways."""
    gateways = [f"gateway-{i}" for i in range(2 * it.gateway["spec"]["replicas"])]
    names = ["head", *machines(it), *gateways, CLIENT, MONITOR]
    with pods(names, hosts_of(it, door="gateway-0"), Image(image)) as there:
        for name in (CLIENT, MONITOR):
            there[name].form = Tree()
        yield Scene(it, there)
