"""Kill controllers in each phase of recovering a gang, and check that no weights are reloaded.

Ranks are killed and experts are rebalanced all the time. Between 2 and 15 s after one controller
died, the next one is killed, in a phase that was not yet hit often enough
(``tests/faults/phases.py``). No rank may reload weights because of that. Every rank that ends was
killed by this test, or was stopped because the experts of its gang were rebalanced.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Trouble
from tests.chaos.machines import Machine, killed
from tests.faults.phases import PHASES

APART_S = 2.0, 15.0
REBALANCE_S = 15.0
GIVEN_UP_S = 20.0
"""Time after which a phase that did not occur is put off and another one is chosen."""
ENOUGH = 3


@dataclass
class Controllers(Trouble):
    """``_alive`` maps processes to ranks. A process is (address, pid) as seen inside its
    machine."""

    _alive: dict[int, tuple[str, int]] = field(default_factory=dict)
    _ended: dict[int, tuple[str, int]] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)
    _hits: list[str] = field(default_factory=list)
    _asked: list[str] = field(default_factory=list)
    _next_at: float = 0.0
    _rebalance_at: float = 0.0

    def one(self) -> None:
        """Kill one rank of a gang, or both."""
        kind = self.draw.choice(["Prefill", "Decode"])
        ranks = [p for one in self.machines.nodes for p in one.pod.pids(f"ray::{kind}Actor")]
        chosen = self.draw.sample(ranks, min(len(ranks), self.draw.choice([1, 1, 2])))
        for pid in chosen:
            self._note()
            if killed(pid):
                self._killed.add(pid)
                self.did("kill a rank", f"{pid}")

    def sweep(self) -> None:
        self._note()
        now = time.monotonic()
        if now > self._rebalance_at:
            self._rebalance_at = now + REBALANCE_S
            gang = self.draw.choice(["prefill-0", "decode-0"])
            self._file("rebalance").write_text(gang)
        hits = self._lines("ended.controllers")
        for phase in hits[len(self._hits) :]:
            self.did(f"controller in {phase}", "by itself")
            self._asked, self._next_at = [], now + self.draw.uniform(*APART_S)
        self._hits = hits
        if now > self._next_at:
            self._ask(now)

    def end(self) -> None:
        self._file("end.controller").unlink(missing_ok=True)
        self._file("rebalance").unlink(missing_ok=True)

    def table(self) -> dict[str, object]:
        """Return figures about loads of weights and epochs of ranks."""
        self._note()
        lives, unexplained = self._lines("lives"), self._unexplained()
        num_unkilled = len(self._ended.keys() - self._killed)
        return {
            "controllers in each phase": dict(Counter(self._hits)),
            "ranks begun": len(self._alive) + len(self._ended),
            "of them killed": len(self._killed),
            "stopped for their experts": num_unkilled - len(unexplained),
            "ended without a reason": unexplained,
            "lives joined": len(lives),
            "joined twice": [life for life, num in Counter(lives).items() if num > 1],
        }

    def _unexplained(self) -> list[tuple[str, int]]:
        stopped = {(h, int(p)) for h, p in map(str.split, self._lines("stopped.ranks"))}
        ended = {pid: who for pid, who in self._ended.items() if pid not in self._killed}
        return [who for who in ended.values() if who not in stopped]

    def is_good(self) -> bool:
        lives = self._lines("lives")
        enough = all(self._hits.count(phase) >= ENOUGH for phase in PHASES)
        return enough and not self._unexplained() and len(lives) == len(set(lives))

    def _ask(self, now: float) -> None:
        """Choose the phase to hit. Adoption, which comes with every controller, alternates with
        others."""
        rare = [phase for phase in PHASES[1:] if self._hits.count(phase) < ENOUGH]
        is_adoption = not self._asked and self._hits.count("adoption") <= len(self._hits) // 6
        self._asked = [PHASES[0]] if is_adoption else rare or [*PHASES[1:]]
        self._next_at = now + GIVEN_UP_S
        new = self._file("end.new")
        new.write_text("\n".join(self._asked))
        new.rename(self._file("end.controller"))
        if is_adoption:
            for machine in self.machines.all.values():
                for pid in machine.pod.pids("ray::Controller"):
                    if killed(pid):
                        self.did("controller, so that there is another", machine.name)

    def _note(self) -> None:
        there = {pid: machine for machine in self.machines.nodes for pid in machine.ranks()}
        for pid in self._alive.keys() - there.keys():
            self._ended[pid] = self._alive.pop(pid)
            self.say(f"rank {self._ended[pid]} has ended, {pid}")
        for pid in there.keys() - self._alive.keys():
            if known := _inner(there[pid], pid):
                self._alive[pid] = known
                self.say(f"rank {known} begins, {pid}")

    def _file(self, name: str) -> Path:
        return self.machines.folder / name

    def _lines(self, name: str) -> list[str]:
        path = self._file(name)
        return path.read_text().splitlines() if path.exists() else []


def _inner(machine: Machine, pid: int) -> tuple[str, int] | None:
    """Return a process's address and pid as the process sees them; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    [line] = [line for line in status.splitlines() if line.startswith("NSpid:")]
    return machine.pod.address, int(line.split()[-1])
