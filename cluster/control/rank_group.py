"""The rank processes of a gang, polled and controlled together. No Ray in it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.cluster.control.failure import EpochOver, check_states, describe_activity, is_starting
from tandem.cluster.control.plan import GangPlan
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import ControlConfig
from tandem.core.errors import EpochEnded, RankLost
from tandem.core.membership import ExpertRows, RankState

if TYPE_CHECKING:
    from tandem.cluster.control.machines import RayRank

LEAVE_TIMEOUT_S = 10.0
"""Seconds that a rank may take to leave an epoch.

It may have to wait until a peer stopped by SIGSTOP is killed, which takes five seconds.
"""
MAX_UNANSWERED = 5
"""Number of consecutive unanswered polls after which a rank that is not ready is lost.

Each poll times out after ``control.stall_timeout_s``. A process that imports torch on a busy
machine may miss one.
"""
Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class RankGroup:
    """Rank processes of a gang that are neither dead nor missing.

    A rank that does not answer within ``control.stall_timeout_s`` is silent. It is lost if there is
    a ``suspicion`` against the gang. A starting rank is lost after ``control.startup_timeout_s``
    without progress, or after MAX_UNANSWERED consecutive unanswered polls.

    Attributes:
        handles: Processes by rank.
        states: Latest state of each rank.
        suspicion: Reason to suspect that a silent rank is lost, "" for none.
    """

    plan: GangPlan
    control: ControlConfig
    handles: "dict[int, RayRank]" = field(default_factory=dict)
    states: dict[int, RankState] = field(default_factory=dict)
    suspicion: str = ""
    weights: ClusterWeights = field(default_factory=ClusterWeights)
    """Weights that all ranks of the cluster must hold."""
    placement_group_epoch: int = 0
    """Epoch for which the gang's placement group was created."""
    _kill_pending: "list[RayRank]" = field(default_factory=list)
    _silent: list[int] = field(default_factory=list)
    _progressed_at: dict[object, float] = field(default_factory=dict)
    """Time at which a rank first reported its current startup progress."""
    _num_unanswered: dict[int, int] = field(default_factory=dict)
    """Consecutive unanswered polls, for ranks that have answered at least once."""

    @property
    def startup_notes(self) -> tuple[str, ...]:
        """Current activity of each rank that is not ready."""
        known = [(rank, self.states.get(rank)) for rank in sorted(self.handles)]
        return tuple(
            self._startup_note(rank) for rank, state in known if not (state and state.info)
        )

    def _startup_note(self, rank: int) -> str:
        name = self.plan.name if self.plan.num_ranks == 1 else f"{self.plan.name}.{rank}"
        silent = ", but it does not answer" if rank in self._silent else ""
        return f"{name}: {describe_activity(self.states.get(rank))}{silent}"

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.plan.num_ranks) if rank not in self.handles]

    async def poll_states(self, seen: tuple[int, int]) -> Sequence[RankState]:
        """Poll all ranks and return their states; () if a rank is silent but not suspected.

        Raises EpochOver if a rank is dead, is silent under suspicion, or makes no startup progress
        for too long.
        """
        suspicion = self.suspicion
        self.suspicion = ""
        self._retry_kills()
        self._stalled_ranks()
        silent = self._silent = await self._poll(self.handles, seen)
        if stalled := self._stalled_ranks():
            lost = silent or stalled  # stalled ranks may be blocked on a silent one
            bound = f"{self.control.startup_timeout_s:g} s (control.startup_timeout_s)"
            raise EpochOver(
                RankLost(f"{self._startup_note(lost[0])}: no progress for {bound}"), *lost
            )
        if unresponsive := self._unresponsive_ranks():
            questions = f"{MAX_UNANSWERED} status calls in a row failed"
            text = f"{self._startup_note(unresponsive[0])}: {questions}"
            raise EpochOver(RankLost(text), *unresponsive)
        if not silent:
            return [self.states[rank] for rank in range(self.plan.num_ranks)]
        suspicion = suspicion or self.suspicion
        if not suspicion:
            # The other ranks' states were read when the silence began, so poll them again.
            others = self.handles.keys() - silent
            others -= set(await self._poll(others, seen))
            try:
                check_states([self.states[rank] for rank in others])
            except EpochOver as over:
                suspicion = str(over)
        if suspicion:
            text = (
                f"rank {silent[0]}: no answer for {self.control.stall_timeout_s:g} s after a "
                f"failure was reported: {suspicion}"
            )
            raise EpochOver(RankLost(text), *silent)
        return ()

    def _stalled_ranks(self) -> list[int]:
        """Return starting ranks whose reported progress, or silence, has lasted too long."""
        now = time.monotonic()
        known = {rank: self.states.get(rank) for rank in self.handles}
        said = {r: (r, s and (s.activity, s.progress, s.is_joined)) for r, s in known.items()}
        since = {r: self._progressed_at.setdefault(said[r], now) for r in said}
        return [
            r
            for r in since
            if now - since[r] > self.control.startup_timeout_s and is_starting(known[r])
        ]

    def _unresponsive_ranks(self) -> list[int]:
        """Return ranks that have answered before and are now silent for too long.

        Ready ranks are excluded, because gateways report those.
        """
        for rank in set(self._silent) & self._num_unanswered.keys():
            self._num_unanswered[rank] += 1
        ready = {rank for rank, state in self.states.items() if state.info is not None}
        return [
            r for r, num in self._num_unanswered.items() if num >= MAX_UNANSWERED and r not in ready
        ]

    async def join(self, states: Sequence[RankState], epoch: int) -> None:
        """Let all ranks join ``epoch``, unless they already have.

        Raises EpochOver if only some of them have, for instance under an earlier controller.
        """
        joined = [state.is_joined for state in states]
        if all(joined):
            return
        if any(joined) or any(s.spec.process_epoch and s.spec.epoch == epoch for s in states):
            raise EpochOver(EpochEnded("some ranks of the gang have already left this epoch"))
        if len({state.placement for state in states}) > 1:
            raise EpochOver(
                RankLost("the ranks of the gang have different expert placements"), *self.handles
            )
        rendezvous = await self._call(self.handles[0].open_rendezvous)
        if isinstance(rendezvous, Exception):
            raise EpochOver(rendezvous, 0)
        joins = []
        for state in states:
            process_epoch = state.spec.process_epoch or state.spec.epoch
            spec = replace(
                state.spec,
                epoch=epoch,
                process_epoch=process_epoch,
                placement_group_epoch=self.placement_group_epoch,
            )
            joins.append(self._call(self.handles[spec.rank].join, spec, rendezvous))
        for rank, failed in enumerate(await asyncio.gather(*joins)):
            if failed is not None:
                raise EpochOver(failed, rank)

    async def expert_rows(self) -> list[ExpertRows]:
        """Return the expert rows of all ranks. Raises RankLost if a rank does not answer."""
        try:
            async with asyncio.timeout(self.control.stall_timeout_s):
                return await asyncio.gather(*(rank.expert_rows() for rank in self.handles.values()))
        except (RankLost, TimeoutError) as error:
            raise RankLost(
                f"{self.plan.name} did not report its numbers of rows per expert: {error!r}"
            ) from error

    async def leave(self) -> None:
        """Let all ranks leave the epoch. A rank that cannot leave is killed."""
        await asyncio.gather(*map(self._leave_epoch, list(self.handles)))

    async def stop(self, deadline_s: float) -> None:
        """Let all ranks stop by themselves within ``deadline_s`` seconds, then kill them."""
        stops = [asyncio.create_task(rank.stop()) for rank in self.handles.values()]
        if stops:
            await asyncio.wait(stops, timeout=deadline_s)
        for stop in stops:
            stop.cancel()
        self.kill(self.handles)

    def kill(self, ranks: Iterable[int]) -> None:
        self._progressed_at.clear()
        for rank in [rank for rank in ranks if rank in self.handles]:  # a leaving rank may be gone
            self.weights.digest_by_rank.pop(self.handles[rank], None)
            self._num_unanswered.pop(rank, None)
            self.states.pop(rank, None)  # a replacement has no state yet
            self._kill_pending.append(self.handles.pop(rank))
        self._retry_kills()

    def _retry_kills(self) -> None:
        """Kill the queued ranks. Those that Ray fails to kill are retried on the next poll."""
        pending = self._kill_pending
        self._kill_pending = []
        for rank in pending:
            try:
                rank.kill()
            except Exception as error:
                log.error("%s cannot be killed, trying again: %r", rank.name, error)
                self._kill_pending.append(rank)

    async def _leave_epoch(self, rank: int) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.handles[rank].leave()
            if rank in self.handles:  # a rank may be killed during the call
                self._num_unanswered[rank] = 0
        except Exception as error:
            log.warning(
                "%s, rank %d cannot be reset for the next epoch, killing it: %r",
                self.plan.name,
                rank,
                error,
            )
            self.kill([rank])

    async def _poll(self, ranks: Iterable[int], seen: tuple[int, int]) -> list[int]:
        """Poll ``ranks``, store their states and return the silent ranks.

        Raises EpochOver if a rank is dead or holds other weights than the cluster.
        """
        polls = {
            rank: self._call(self.handles[rank].get_state, *seen, self.weights.digest)
            for rank in ranks
        }
        answers = dict(zip(polls, await asyncio.gather(*polls.values()), strict=True))
        for rank, answer in answers.items():
            if isinstance(answer, RankLost):
                raise EpochOver(answer, rank)
            if isinstance(answer, RankState):
                if not self.weights.record(self.handles[rank], answer.weights):
                    # The rank started to load before the cluster's weights were known.
                    raise EpochOver(
                        RankLost(
                            f"{answer.spec.epoch_name}: loaded weights with digest "
                            f"{answer.weights}, "
                            f"but its cluster serves weights with digest {self.weights.digest}"
                        ),
                        rank,
                    )
                self.states[rank] = answer
                self._num_unanswered[rank] = 0
        return [rank for rank in answers if isinstance(answers[rank], TimeoutError)]

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], *args: Any
    ) -> Answer | RankLost | TimeoutError:
        try:
            async with asyncio.timeout(self.control.stall_timeout_s):
                return await method(*args)
        except (RankLost, TimeoutError) as error:
            return error
