"""The lockstep of a gang over a simulated network.

The member's protocol and the planner's rounds are the product's. Connections and collectives are
replaced. The end of one process ends the epoch for all ranks.

The real ones are tested in tests/integration/test_lockstep.py, test_gang_steps.py and
test_gang_faults.py.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.core.errors import EpochEnded
from tandem.core.membership import RankSpec, Rendezvous
from tandem.core.progress import LockstepPosition
from tandem.core.schema import pack, unpack
from tandem.runtime.gang.collectives import CONNECT_S
from tandem.runtime.gang.gang_lockstep import GangLockstep
from tandem.runtime.gang.planner_messages import PlanMessage, ProposalMessage
from tandem.runtime.gang.proposal_rounds import ProposalRounds
from tandem.runtime.stall_detector import StallDetector
from tests.sim.loop import here
from tests.sim.net import Net

GONE = "the connection to the planner ended"


@dataclass(eq=False)
class Gangs:
    """All rendezvous, by port."""

    net: Net
    hubs: dict[int, "SimHub"] = field(default_factory=dict)

    def hub(self, num_ranks: int, host: str) -> "SimHub":
        made = SimHub(self.net, num_ranks, host)
        self.hubs[made.rendezvous.port] = made
        return made

    def member(
        self,
        spec: RankSpec,
        rendezvous: Rendezvous,
        planner_server: Any,
        device: Any,
        stall_detector: StallDetector,
    ) -> "SimMember":
        return SimMember(self.net, self.hubs[rendezvous.port], spec, planner_server, stall_detector)


class SimHub:
    """Rank 0's planner server, in rank 0's process.

    Works like runtime/gang/planner_server.py, without its thread and connections.
    """

    def __init__(self, net: Net, num_ranks: int, host: str) -> None:
        self.process, self._num_ranks = here(), num_ranks
        self.rendezvous = Rendezvous(host, net.next_port(), 0, b"t" * 32)
        self.members: dict[int, SimMember] = {}
        self._rounds: ProposalRounds[Any, Any] | None = None
        self._proposal: type = object
        self.is_closed = False
        self.process.closes.append(self.close)

    def start_planning(self, decide: Any, proposal: type) -> None:
        self._rounds, self._proposal = ProposalRounds(self._num_ranks, decide), proposal

    def come(self, member: "SimMember") -> None:
        """Register a member. Once all are there they may start."""
        if self.is_closed:
            return member.hear(member.lose, GONE)
        self.members[member.rank] = member
        if len(self.members) == self._num_ranks:
            for one in self.members.values():
                one.hear(one.meet)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            for member in self.members.values():
                member.hear(member.lose, GONE)

    def propose(self, rank: int, message: ProposalMessage) -> None:
        if self.is_closed or self._rounds is None:
            return
        self._rounds.propose(rank, message.step, unpack(self._proposal, message.proposal))
        self._poll_ranks()
        while (planned := self._rounds.plan()) is not None:
            step, key = planned
            for member in self.members.values():
                member.hear(member.take, PlanMessage(step, None if key is None else pack(key)))
            self._poll_ranks()

    def _poll_ranks(self) -> None:
        assert self._rounds is not None
        for rank in self._rounds.ranks_to_poll():
            member = self.members[rank]
            member.hear(member.take, PlanMessage(self._rounds.step, is_poll=True))


class _Peers:
    """Replaces the collectives, and transfers nothing."""

    is_aborted = False

    def __init__(self) -> None:
        self.position = LockstepPosition()

    def start_step(self, step: int, timeout_s: float) -> None:
        self.position = LockstepPosition(step)

    def abort(self) -> None:
        """Do nothing: no collective runs that could be ended."""


class SimMember(GangLockstep):
    """A member, made on a thread that waits for the other ranks. Messages to it arrive by
    ``hear``."""

    def __init__(
        self,
        net: Net,
        there: SimHub,
        spec: RankSpec,
        hub: SimHub | None,
        stall_detector: StallDetector,
    ) -> None:
        self.process, self.rank, self._net, self._there = here(), spec.rank, net, there
        self.collectives = _Peers()  # type: ignore[assignment]
        stall_detector.position = lambda: self.collectives.position
        self._name, self._planner_server = spec.epoch_name, hub  # type: ignore[assignment]
        self._stall_detector, self._clock, self._due_at = (
            stall_detector,
            stall_detector.clock,
            math.inf,
        )
        self._key_type: Any = None
        self._on_step_requested: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._next_step, self._requested_step, self._plans, self._end_reason = 1, 0, {}, ""
        self._reader = threading.Thread(target=lambda: None)
        self._has_met = False
        self.process.closes.append(self._leave)
        self._tell(there.come, self)
        with self._changed:
            self._changed.wait_for(lambda: self._has_met or self._end_reason, CONNECT_S)
        if self._end_reason or not self._has_met:
            self._leave()
            raise EpochEnded(
                f"{self._name}: the process group of the gang cannot be created: {self._end_reason}"
            )

    def hear(self, what: Callable[..., None], *given: Any) -> None:
        """Run a function in this member's process, when its message arrives."""
        self.process.call(what, *given, after_s=self._net.latency_s())

    def meet(self) -> None:
        with self._changed:
            self._has_met = True
            self._changed.notify_all()

    def take(self, told: PlanMessage) -> None:
        self._on_message(told)

    def lose(self, reason: str) -> None:
        self._end_epoch(reason)

    def close(self) -> None:
        self._leave()
        if self._planner_server is not None:
            self._planner_server.close()

    def _send(self, message: ProposalMessage) -> None:
        self._tell(self._there.propose, self.rank, message)

    def _tell(self, what: Callable[..., None], *given: Any) -> None:
        self._there.process.call(what, *given, after_s=self._net.latency_s())

    def _leave(self) -> None:
        """Close the connection to the planner, which then ends all others."""
        self._tell(self._there.close)
