"""The machines of a chaos run: pods whose containers are restarted when they end."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.procs import ROOT, python_path
from tests.pods import Pod, pods

HEAD_PORT = 9000
RAY_PORTS, RAY_MASK = 0x2000, 0xE000
"""All ports of Ray are in this block, so that a cut between machines can spare Ray's traffic."""
RAY = (
    *("--disable-usage-stats", f"--object-store-memory={128 << 20}", "--block"),
    *("--node-manager-port=8300", "--object-manager-port=8301", "--metrics-export-port=8302"),
    *("--runtime-env-agent-port=8303", "--dashboard-agent-grpc-port=8304"),
    *("--dashboard-agent-listen-port=8305", "--min-worker-port=9100", "--max-worker-port=9999"),
)
SHM_OF_RAY = "512m"
GATEWAYS = "gateway-0", "gateway-1"
CLIENTS = "client", "stranger"
"""Machines outside the cluster: one for well-behaved clients, one for all other clients."""
GATEWAY_PORT = 50051
RANKS = "ray::PrefillActor", "ray::DecodeActor"
PAUSE_S = 2.0
"""Pause before an ended container is restarted."""


@dataclass
class Machine:
    """``num_begun`` counts its containers. ``is_ready`` is set when a gateway reports readiness."""

    name: str
    pod: Pod
    command: list[str]
    shm: str
    env: dict[str, str]
    num_begun: int = 0
    is_ready: bool = False
    said: list[str] = field(default_factory=list)

    def begin(self) -> None:
        process = self.pod.run(self.command, shm=self.shm, env=self.env)
        self.num_begun, self.is_ready = self.num_begun + 1, False
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said = [*self.said[-50:], line]
            self.is_ready |= line.startswith("ready grpc=")

    @property
    def has_ended(self) -> bool:
        return not self.pod.processes or self.pod.processes[-1].poll() is not None

    def ranks(self) -> list[int]:
        return [pid for title in RANKS for pid in self.pod.pids(title)]


class Machines:
    """All machines by name. A thread restarts ended ones until ``leave``."""

    def __init__(self, there: dict[str, Pod], sets: Sequence[str], folder: Path) -> None:
        head = f"{there['head'].address}:{HEAD_PORT}"
        wait = f"until ray health-check --address {head} &>/dev/null; do sleep 1; done; "
        env = {"FAULTS": str(folder), "CHAOS": "1", "RAY_enable_metrics_collection": "0"}
        env["PYTHONPATH"] = python_path(ROOT, ROOT / "tests" / "faults")
        asked = [f"--set={one}" for one in (f"server.address=0.0.0.0:{GATEWAY_PORT}", *sets)]
        self.folder = folder
        self.all = dict[str, Machine]()
        self.client, self.stranger = (there[name] for name in CLIENTS)
        for name, pod in there.items():
            own = [*RAY, f"--node-ip-address={pod.address}"]
            shm, more = SHM_OF_RAY, env
            if name == "head":
                more = env | {"RAY_gcs_storage": "rocksdb"}
                more |= {"RAY_gcs_storage_path": str(folder / "gcs")}
                options = (f"--port={HEAD_PORT}", "--num-cpus=0", "--include-dashboard=false")
                command = ["ray", "start", "--head", *options, *own]
            elif name in GATEWAYS:
                command, more = (
                    ["bash", "-c", 'exec tandem-gateway "$@"', "-", *asked],
                    env | {"RAY_ADDRESS": head},
                )
            elif name in CLIENTS:
                continue
            else:
                start = " ".join(["exec ray start", f"--address={head}", "--num-cpus=2", *own])
                command = ["bash", "-c", wait + start]
            self.all[name] = Machine(name, pod, command, shm, more)
        self._left = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    @property
    def nodes(self) -> list[Machine]:
        return [one for one in self.all.values() if one.name.startswith("node")]

    @property
    def gateways(self) -> list[Machine]:
        return [self.all[name] for name in GATEWAYS]

    @property
    def address(self) -> str:
        """Addresses of both gateways, as a target of gRPC clients."""
        return "ipv4:" + ",".join(f"{one.pod.address}:{GATEWAY_PORT}" for one in self.gateways)

    def begin(self, timeout_s: float) -> None:
        """Start all machines and wait until both gateways serve. Raises TimeoutError with a
        gateway's log."""
        for machine in self.all.values():
            machine.begin()
        self._keeper.start()
        give_up_at = time.monotonic() + timeout_s
        while not all(one.is_ready for one in self.gateways):
            if time.monotonic() > give_up_at:
                raise TimeoutError("".join(one.pod.log()[-3000:] for one in self.gateways))
            time.sleep(0.2)  # time: between two looks

    def leave(self) -> None:
        self._left.set()
        self._keeper.join()

    def _keep(self) -> None:
        while not self._left.wait(0.5):  # time: between two looks
            for machine in self.all.values():
                # time: a pod that is begun again comes later
                if machine.has_ended and not self._left.wait(PAUSE_S):
                    machine.begin()

    # Faults of the network between machines.

    def cut(self, one: Machine, other: Machine, spares_ray: bool) -> None:
        """From now on drop everything that ``one`` sends to ``other``, optionally except Ray's
        traffic."""
        run = Tc(one.pod.name)
        run("qdisc add dev eth0 root handle 1: htb default 10")
        run("class add dev eth0 parent 1: classid 1:10 htb rate 100gbit quantum 60000")
        run("class add dev eth0 parent 1: classid 1:20 htb rate 8bit ceil 8bit quantum 1500")
        run("qdisc add dev eth0 parent 1:20 pfifo limit 1")
        to = f"match ip dst {other.pod.address}/32"
        ports = ("dport", "sport") if spares_ray else ()
        for number, port in enumerate(ports):
            match = f"u32 {to} match ip {port} {RAY_PORTS:#x} {RAY_MASK:#x}"
            run(f"filter add dev eth0 parent 1: protocol ip prio {1 + number} {match} flowid 1:10")
        run(f"filter add dev eth0 parent 1: protocol ip prio 9 u32 {to} flowid 1:20")

    def heal(self, one: Machine) -> None:
        Tc(one.pod.name)("qdisc del dev eth0 root")


@dataclass(frozen=True)
class Tc:
    """Traffic control (tc) in the network namespace of a pod."""

    name: str

    def __call__(self, command: str) -> None:
        words = ["ip", "netns", "exec", self.name, "tc", *command.split()]
        subprocess.run(words, check=True, capture_output=True)


@contextmanager
def machines(num_nodes: int, sets: Sequence[str], folder: Path) -> Iterator[Machines]:
    """Yield machines that are not started; end all of them with the block."""
    nodes = [f"node-{i}" for i in range(num_nodes)]
    with pods(["head", *GATEWAYS, *nodes, *CLIENTS], {}) as there:
        made = Machines(there, sets, folder)
        try:
            yield made
        finally:
            made.leave()


@contextmanager
def asking(made: Machines, num_clients: int, seed: int, poison_s: float | None) -> Iterator[None]:
    """Run clients during the block, then let them finish their open requests."""
    words = ["--address", made.address, "--folder", str(made.folder), "--seed", str(seed)]
    command = ["python", "-m", "tests.chaos.asker", *words, "--clients", str(num_clients)]
    command += [] if poison_s is None else ["--poison", str(poison_s)]
    process = made.client.run(command)
    try:
        yield
    finally:
        (made.folder / "stop").touch()
    code = process.wait(180)
    assert code == 0, made.client.log()[-3000:]


def killed(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; return whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def lines(path: Path) -> list[dict]:
    """Return the records written so far, without a line that is still being written."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
