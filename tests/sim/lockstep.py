"""The lockstep of a gang, imitated: its planner is real (runtime/gang/rounds.py), its connections
and collectives are not. Any of its processes' end is the epoch's end for the others.

The real ones are tests/integration/test_lockstep.py, test_gang_steps.py and test_gang_faults.py.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from core.errors import EpochEnded, ProgramFailed
from core.membership import Meeting, RankSpec
from core.pace import Place
from runtime.gang.rounds import Rounds
from runtime.lockstep import Lockstep, Plan
from runtime.watch import Watch
from tests.sim.loop import Process, here
from tests.sim.net import Net

CONNECT_S, DATA_FACTOR = 30.0, 3


@dataclass(eq=False)
class Gangs:
    """All meetings, by the port that they were given. ``joined`` is told of every rank that begins
    a life."""

    net: Net
    joined: Callable[[RankSpec], None]
    hubs: dict[int, "SimHub"] = field(default_factory=dict)

    def hub(self, num_ranks: int, host: str) -> "SimHub":
        made = SimHub(self, num_ranks, host)
        self.hubs[made.meeting.port] = made
        return made

    def member(
        self, spec: RankSpec, meeting: Meeting, hub: Any, device: Any, watch: Watch
    ) -> "SimMember":
        return SimMember(self, spec, meeting, hub, watch)


class SimHub:
    """Rank 0's, in its process."""

    def __init__(self, gangs: Gangs, num_ranks: int, host: str) -> None:
        self.process, self._gangs, self._num_ranks = here(), gangs, num_ranks
        token = b"t" * 32
        self.meeting = Meeting(host, gangs.net.next_port(), 0, token)
        self.members: dict[int, SimMember] = {}
        self.rounds: Rounds[Any, Any] | None = None
        self.is_closed = False
        self.process.on_death.append(self.close)

    def run(self, decide: Any, proposal: type) -> None:
        self.rounds = Rounds(self._num_ranks, decide)

    def come(self, member: "SimMember") -> None:
        """All are there: they may begin."""
        if self.is_closed:
            member.later(member.lose, "the planner has gone")
            return
        self.members[member.rank] = member
        if len(self.members) == self._num_ranks:
            for one in self.members.values():
                one.later(one.meet)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            for member in self.members.values():
                member.later(member.lose, "the planner has gone")

    def propose(self, rank: int, step: int, proposal: Any) -> None:
        if self.is_closed or self.rounds is None:
            return
        self.rounds.propose(rank, step, proposal)
        self._ask()
        while (planned := self.rounds.plan()) is not None:
            for member in self.members.values():
                member.later(member.told, *planned)
            self._ask()

    def _ask(self) -> None:
        assert self.rounds is not None
        for rank in self.rounds.asks():
            self.members[rank].later(self.members[rank].asked, self.rounds.step)


class _Peers:
    """What a dispatch is joined to."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.is_aborted, self.place = rank, num_ranks, False, Place()


class SimMember(Lockstep):
    """As runtime/gang/member.py. Made on a thread, which waits for the other ranks."""

    collectives: Any

    def __init__(
        self, gangs: Gangs, spec: RankSpec, meeting: Meeting, hub: SimHub | None, watch: Watch
    ) -> None:
        self.process: Process = here()
        self.rank, self._name, self._gangs, self._hub = spec.rank, spec.life, gangs, hub
        self.collectives = _Peers(spec.rank, spec.num_ranks)
        watch.place = lambda: self.collectives.place
        self._watch = watch
        self._changed = threading.Condition()
        self._has_met = False
        self._lost = ""
        self._next, self._asked = 1, 0
        self._plans: dict[int, Any] = {}
        self._on_asked: Callable[[], None] = lambda: None
        gangs.joined(spec)
        self._there = gangs.hubs[meeting.port]
        self.process.on_death.append(self._leave)
        self._there.process.call(self._there.come, self, after_s=gangs.net.latency_s())
        with self._changed:
            self._changed.wait_for(lambda: self._has_met or self._lost, CONNECT_S)
        if not self._has_met or self._lost:
            self._leave()
            raise EpochEnded(f"{self._name}: the gang does not come together: {self._lost}")

    def later(self, function: Callable[..., None], *given: Any) -> None:
        """In its process, as a message comes."""
        self.process.call(function, *given, after_s=self._gangs.net.latency_s())

    def planner(self, decide: Any, schema: Any, on_asked: Callable[[], None]) -> "SimMember":
        self._on_asked = on_asked
        if self._hub is not None:
            self._hub.run(decide, schema[0])
        return self

    @property
    def is_asked(self) -> bool:
        return self._asked >= self._next or bool(self._lost)

    def plan(self, proposal: Any) -> Plan[Any]:
        step, timeout_s = self._next, DATA_FACTOR * self._watch.bound_s
        self.collectives.place = Place(step)
        hub = self._there
        hub.process.call(
            hub.propose, self.rank, step, proposal, after_s=self._gangs.net.latency_s()
        )
        with self._changed:
            self._changed.wait_for(lambda: step in self._plans or self._lost, timeout_s)
            if step not in self._plans:
                raise EpochEnded(f"{self._name}, step {step}: {self._lost or 'no plan in time'}")
            key = self._plans.pop(step)
        self._next = step + 1
        return Plan(step, key)

    @contextmanager
    def program(self) -> Iterator[None]:
        try:
            yield
        except EpochEnded:
            raise
        except Exception as error:
            raise ProgramFailed(f"{self._name}: its part of a step failed: {error!r}") from error
        if self._lost:
            raise EpochEnded(f"{self._name}: {self._lost}")

    @contextmanager
    def reading(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self._leave()
        if self._hub is not None:
            self._hub.close()

    def meet(self) -> None:
        with self._changed:
            self._has_met = True
            self._changed.notify_all()

    def told(self, step: int, key: Any) -> None:
        with self._changed:
            self._plans[step] = key
            self._changed.notify_all()

    def asked(self, step: int) -> None:
        self._asked = step
        self._on_asked()

    def lose(self, reason: str) -> None:
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()
        self._on_asked()

    def _leave(self) -> None:
        """The planner sees its connection end, and ends all others."""
        if not getattr(self.process, "is_gone", False):
            hub = self._there
            hub.process.call(hub.close, after_s=self._gangs.net.latency_s())
