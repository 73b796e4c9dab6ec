"""Faults injected into the machines, each at one moment; some of them end by themselves."""

import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.hostile.kinds import KINDS as HOSTILE
from tests.chaos.machines import GATEWAY_PORT, Machine, Machines, killed

KINDS = {
    "kill a rank": 5,
    "stop a rank for ever": 2,
    "stop a rank, then continue": 3,
    "kill the controller": 3,
    "kill a gateway": 2,
    "kill a raylet": 2,
    "kill the head": 1,
    "cut two machines": 4,
    "hostile client": 3,
    "fill a gateway": 2,
}
"""Weight of each kind when a fault is drawn."""
STOPPED_S = 1.0, 8.0
CUT_S = 1.0, 12.0
HOSTILE_S = 8.0, 20.0
"""Range of the time for which a client misbehaves, including the start of its process."""


@dataclass
class Trouble(ABC):
    """Source of faults of a run: ``applied`` counts them by kind, ``log`` has their times."""

    machines: Machines
    draw: random.Random
    applied: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    @abstractmethod
    def one(self) -> None:
        """Inject one fault now."""

    @abstractmethod
    def sweep(self) -> None:
        """Do the work that is due between two polls."""

    @abstractmethod
    def end(self) -> None:
        """End all faults."""

    def table(self) -> dict[str, object]:
        """Return further figures for the report of the run."""
        return {}

    def is_good(self) -> bool:
        """Whether these figures are as they should be."""
        return True

    def did(self, kind: str, what: str) -> None:
        self.applied[kind] += 1
        self.say(f"{kind}: {what}")

    def say(self, text: str) -> None:
        self.log.append(f"{time.time():.1f} {text}")


@dataclass
class Faults(Trouble):
    """Any of KINDS; ``_due`` lists the faults that end later, and when."""

    only: list[str] = field(default_factory=list)
    _due: list[tuple[float, Callable[[], object]]] = field(default_factory=list)
    _cut: set[str] = field(default_factory=set)

    def one(self) -> None:
        """Draw kinds until one of them can be injected."""
        while True:
            often = {kind: KINDS[kind] for kind in self.only} or KINDS
            [kind] = self.draw.choices([*often], [*often.values()])
            done = getattr(self, "_" + kind.replace(" ", "_").replace(",", ""))()
            if done:
                return self.did(kind, done)

    def sweep(self) -> None:
        now = time.monotonic()
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            due[1]()

    def end(self) -> None:
        for _, over in self._due:
            over()
        self._due.clear()

    def _ranks(self) -> list[tuple[Machine, int]]:
        return [(machine, pid) for machine in self.machines.nodes for pid in machine.ranks()]

    def _signal(self, number: int) -> tuple[str, int]:
        if not (ranks := self._ranks()):
            return "", 0
        machine, pid = self.draw.choice(ranks)
        return (machine.name, pid) if killed(pid, number) else ("", 0)

    def _kill_a_rank(self) -> str:
        return self._signal(signal.SIGKILL)[0]

    def _stop_a_rank_for_ever(self) -> str:
        return self._signal(signal.SIGSTOP)[0]

    def _stop_a_rank_then_continue(self) -> str:
        name, pid = self._signal(signal.SIGSTOP)
        if not name:
            return ""
        for_s = self.draw.uniform(*STOPPED_S)
        self._later_passes(for_s, lambda: killed(pid, signal.SIGCONT))
        return f"{name} for {for_s:.1f} s"

    def _kill_the_controller(self) -> str:
        pids = [p for one in self.machines.all.values() for p in one.pod.pids("ray::Controller")]
        return "it" if pids and killed(pids[0]) else ""

    def _kill_a_gateway(self) -> str:
        """Kill a gateway and its raylet, if another gateway serves."""
        if not all(one.is_ready and not one.has_ended for one in self.machines.gateways):
            return ""
        gateway = self.draw.choice(self.machines.gateways)
        return gateway.name if killed(gateway.pod.init()) else ""

    def _kill_a_raylet(self) -> str:
        """Kill a raylet and all that runs on its machine, unless another one is starting."""
        nodes = [(one, one.pod.pids("/raylet/raylet\0")) for one in self.machines.nodes]
        if not all(pids for _, pids in nodes):
            return ""
        node, pids = self.draw.choice(nodes)
        return node.name if killed(pids[0]) else ""

    def _kill_the_head(self) -> str:
        """Kill the head and the controller. Ray's own state survives on the head's disk."""
        head = self.machines.all["head"]
        is_there = not head.has_ended and head.pod.pids("ray::Controller")
        return "it" if is_there and killed(head.pod.init()) else ""

    def _cut_two_machines(self) -> str:
        """Cut one direction or both, for all traffic or for all except Ray's."""
        ends = [*self.machines.nodes, *self.machines.gateways]
        free = [one for one in ends if one.name not in self._cut]
        if len(free) < 2:
            return ""
        one, other = self.draw.sample(free, 2)
        is_both, spares_ray = self.draw.random() < 0.5, self.draw.random() < 0.5
        pairs = [(one, other), (other, one)][: 1 + is_both]
        for a, b in pairs:
            self.machines.cut(a, b, spares_ray)
            self._cut.add(a.name)
        for_s = self.draw.uniform(*CUT_S)
        self._later_passes(for_s, lambda: [self._heal(a) for a, _ in pairs])
        what = "what is not Ray's" if spares_ray else "all"
        way = "to and from" if is_both else "to"
        return f"{what} from {one.name} {way} {other.name} for {for_s:.1f} s"

    def _hostile_client(self) -> str:
        return self._from_outside(self.draw.choice([*HOSTILE]))

    def _fill_a_gateway(self) -> str:
        """Fill a gateway with requests of well-behaved clients."""
        return self._from_outside("crowd")

    def _from_outside(self, kind: str) -> str:
        """Run a client of the given kind, on a separate machine, against one gateway."""
        gateway, for_s = self.draw.choice(self.machines.gateways), self.draw.uniform(*HOSTILE_S)
        words = ["--kind", kind, "--grpc", f"{gateway.pod.address}:{GATEWAY_PORT}"]
        command = ["python", "-m", "benchmarks.hostile.client", *words]
        process = self.machines.stranger.run(command)
        self._later_passes(for_s, process.kill)
        return f"{kind} at {gateway.name} for {for_s:.1f} s"

    def _heal(self, machine: Machine) -> None:
        self.machines.heal(machine)
        self._cut.discard(machine.name)

    def _later_passes(self, after_s: float, function: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + after_s, function))
