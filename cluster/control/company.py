"""The processes of a gang's ranks, asked and told as one. No Ray in it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.cluster.control.plan import GangPlan
from tandem.cluster.control.verdict import LifeOver, check, doing, is_starting
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import ControlConfig
from tandem.core.errors import EpochEnded, RankLost
from tandem.core.membership import ExpertRows, RankState

if TYPE_CHECKING:
    from tandem.cluster.control.machines import RayRank

LEAVE_S = 10.0
"""Of which a stopped process, whom the others of its gang wait for, takes five to be killed."""
MAX_UNANSWERED = 5
"""Questions in a row that a rank that is not ready may leave unanswered for
``control.stall_timeout_s`` each. A process that imports torch on a busy machine may well leave one
unanswered."""
Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Company:
    """``handles`` and what they said last (``states``), by rank; ranks that are neither dead nor
    missing. Who does not answer within ``control.stall_timeout_s`` is silent, and lost if there is
    a ``suspicion``; who starts is lost when it has said nothing new for
    ``control.startup_timeout_s``, or has left MAX_UNANSWERED questions in a row unanswered."""

    plan: GangPlan
    control: ControlConfig
    handles: "dict[int, RayRank]" = field(default_factory=dict)
    states: dict[int, RankState] = field(default_factory=dict)
    suspicion: str = ""
    weights: ClusterWeights = field(default_factory=ClusterWeights)
    """Of all gangs of the cluster."""
    room: int = 0
    """The life for which the room was taken that they are in."""
    _doomed: "list[RayRank]" = field(default_factory=list)
    _silent: list[int] = field(default_factory=list)
    _since: dict[object, float] = field(default_factory=dict)
    """When a rank said first what it says of its start."""
    _num_silent: dict[int, int] = field(default_factory=dict)
    """Questions in a row that a rank has not answered, of those that have ever answered one."""

    @property
    def starts(self) -> tuple[str, ...]:
        """What each does that is not ready."""
        known = [(rank, self.states.get(rank)) for rank in sorted(self.handles)]
        return tuple(self._start(rank) for rank, state in known if not (state and state.info))

    def _start(self, rank: int) -> str:
        name = self.plan.name if self.plan.num_ranks == 1 else f"{self.plan.name}.{rank}"
        silent = ", but it does not answer" if rank in self._silent else ""
        return f"{name}: {doing(self.states.get(rank))}{silent}"

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.plan.num_ranks) if rank not in self.handles]

    async def ask(self, seen: tuple[int, int]) -> Sequence[RankState]:
        """What all ranks say, nothing while one is silent without a reason to suspect it. Raises
        LifeOver if one is dead, silent when there is, or has not got on for too long."""
        suspicion, self.suspicion = self.suspicion, ""
        self._end_doomed()
        self._stalled()
        silent = self._silent = await self._ask(self.handles, seen)
        if stalled := self._stalled():
            lost = silent or stalled  # others may wait for who is silent, whatever it said last
            bound = f"{self.control.startup_timeout_s:g} s (control.startup_timeout_s)"
            raise LifeOver(RankLost(f"{self._start(lost[0])}: no progress for {bound}"), *lost)
        if mute := self._mute():
            text = f"{self._start(mute[0])}: {MAX_UNANSWERED} questions in a row were unanswered"
            raise LifeOver(RankLost(text), *mute)
        if not silent:
            return [self.states[rank] for rank in range(self.plan.num_ranks)]
        suspicion = suspicion or self.suspicion
        if not suspicion:
            # What the others said is as old as the silence.
            others = self.handles.keys() - silent
            others -= set(await self._ask(others, seen))
            try:
                check([self.states[rank] for rank in others])
            except LifeOver as over:
                suspicion = str(over)
        if suspicion:
            text = (
                f"rank {silent[0]}: no answer for {self.control.stall_timeout_s:g} s: {suspicion}"
            )
            raise LifeOver(RankLost(text), *silent)
        return ()

    def _stalled(self) -> list[int]:
        """Who starts and has said the same for too long, or nothing."""
        now, known = time.monotonic(), {rank: self.states.get(rank) for rank in self.handles}
        said = {r: (r, s and (s.doing, s.progress, s.is_joined)) for r, s in known.items()}
        since = {r: self._since.setdefault(said[r], now) for r in said}
        return [
            r
            for r in since
            if now - since[r] > self.control.startup_timeout_s and is_starting(known[r])
        ]

    def _mute(self) -> list[int]:
        """Return ranks that have answered once and are silent for too long, without those that are
        ready: gateways report those."""
        for rank in set(self._silent) & self._num_silent.keys():
            self._num_silent[rank] += 1
        ready = {rank for rank, state in self.states.items() if state.info is not None}
        return [
            r for r, num in self._num_silent.items() if num >= MAX_UNANSWERED and r not in ready
        ]

    async def join(self, states: Sequence[RankState], epoch: int) -> None:
        """Bring the ranks together, unless they are. Some that are and others that are not were
        left so by an earlier controller."""
        joined = [state.is_joined for state in states]
        if all(joined):
            return
        if any(joined) or any(s.spec.born and s.spec.epoch == epoch for s in states):
            raise LifeOver(EpochEnded("some of its ranks have left this life already"))
        if len({state.placement for state in states}) > 1:
            raise LifeOver(RankLost("its ranks differ in where experts lie"), *self.handles)
        meeting = await self._call(self.handles[0].host)
        if isinstance(meeting, Exception):
            raise LifeOver(meeting, 0)
        joins = []
        for state in states:
            born = state.spec.born or state.spec.epoch
            spec = replace(state.spec, epoch=epoch, born=born, room=self.room)
            joins.append(self._call(self.handles[spec.rank].join, spec, meeting))
        for rank, failed in enumerate(await asyncio.gather(*joins)):
            if failed is not None:
                raise LifeOver(failed, rank)

    async def expert_rows(self) -> list[ExpertRows]:
        """Of all ranks. Raises RankLost if one does not tell."""
        try:
            async with asyncio.timeout(self.control.stall_timeout_s):
                return await asyncio.gather(*(rank.expert_rows() for rank in self.handles.values()))
        except (RankLost, TimeoutError) as error:
            raise RankLost(f"{self.plan.name} does not tell its rows: {error!r}") from error

    async def leave(self) -> None:
        """All that are left leave this life; who cannot, for whatever reason, is killed."""
        await asyncio.gather(*map(self._leave, list(self.handles)))

    async def stop(self, deadline_s: float) -> None:
        """They stop by themselves, within ``deadline_s`` seconds; then they are killed."""
        stops = [asyncio.create_task(rank.stop()) for rank in self.handles.values()]
        if stops:
            await asyncio.wait(stops, timeout=deadline_s)
        for stop in stops:
            stop.cancel()
        self.kill(self.handles)

    def kill(self, ranks: Iterable[int]) -> None:
        self._since.clear()
        for rank in [rank for rank in ranks if rank in self.handles]:  # one that leaves may be gone
            self.weights.held.pop(self.handles[rank], None)
            self._num_silent.pop(rank, None)
            self.states.pop(rank, None)  # who comes in its place has said nothing yet
            self._doomed.append(self.handles.pop(rank))
        self._end_doomed()

    def _end_doomed(self) -> None:
        """Whom Ray cannot kill now it is asked to kill again, while the gang is looked after."""
        doomed, self._doomed = self._doomed, []
        for rank in doomed:
            try:
                rank.kill()
            except Exception as error:
                log.error("%s cannot be killed: %r", rank.name, error)
                self._doomed.append(rank)

    async def _leave(self, rank: int) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.handles[rank].leave()
            if rank in self.handles:  # it may have been killed meanwhile
                self._num_silent[rank] = 0
        except Exception as error:
            log.warning("%s, rank %d cannot go on: %r", self.plan.name, rank, error)
            self.kill([rank])

    async def _ask(self, ranks: Iterable[int], seen: tuple[int, int]) -> list[int]:
        """Note what these say; who of them is silent. Raises LifeOver if one is dead."""
        asked = {
            rank: self._call(self.handles[rank].who, *seen, self.weights.digest) for rank in ranks
        }
        told = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        for rank, answer in told.items():
            if isinstance(answer, RankLost):
                raise LifeOver(answer, rank)
            if isinstance(answer, RankState):
                if not self.weights.hold(self.handles[rank], answer.weights):
                    # It began to load before a rank had told what the cluster has.
                    raise LifeOver(
                        RankLost(
                            f"{answer.spec.life}: holds weights {answer.weights}, but its cluster "
                            f"has {self.weights.digest}"
                        ),
                        rank,
                    )
                self.states[rank] = answer
                self._num_silent[rank] = 0
        return [rank for rank in told if isinstance(told[rank], TimeoutError)]

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], *given: Any
    ) -> Answer | RankLost | TimeoutError:
        try:
            async with asyncio.timeout(self.control.stall_timeout_s):
                return await method(*given)
        except (RankLost, TimeoutError) as error:
            return error
