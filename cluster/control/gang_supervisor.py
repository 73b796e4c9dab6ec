"""Supervision of one gang across epochs: start, poll, end, restart. No Ray in it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tandem.cluster.control.failure import EpochFailure, EpochOver, check_states, has_failed
from tandem.cluster.control.plan import EpochLaunch, GangPlan, is_complete, placement_group_epoch_of
from tandem.cluster.control.rank_group import RankGroup
from tandem.cluster.control.restart_policy import RestartDecision, RestartHistory, decide_restart
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import TandemConfig
from tandem.core.membership import DOWN, DRAINING, LOST, READY, STARTING, EpochEnd, Gang, RankState
from tandem.core.placement import Placement
from tandem.core.tasks import cancel_and_wait

if TYPE_CHECKING:
    from tandem.cluster.control.machines import RayMachines, RayRank

POLL_S = 1.0
STARTING_POLL_S = 0.2
log = logging.getLogger(__name__)


class EpochCounter:
    """Source of epoch numbers. No two epochs of any gangs have the same number.

    ``seen`` is (incarnation of the controller, latest epoch). Both continue from the largest values
    that any rank has seen. An epoch number is at least the current time in milliseconds. A new
    cluster therefore does not reuse numbers of a previous one, which it does not know.
    """

    def __init__(self) -> None:
        self.seen = (0, 0)

    def next_epoch(self) -> int:
        incarnation, epoch = self.seen
        self.seen = incarnation, max(epoch + 1, int(time.time() * 1000))
        return self.seen[1]


@dataclass(eq=False)
class GangSupervisor:
    """Supervisor of one gang, whose rank processes ``machines`` start.

    The epoch ends when any rank is lost. The other ranks keep process and weights and join the next
    epoch, unless they cannot leave this one.

    Attributes:
        epochs: Source of epoch numbers. The ranks remember its ``seen`` for the next controller.
        on_change: Called after each change of ``gang``.
        gang: Published state of the gang.
        ranks: The rank processes.
    """

    plan: GangPlan
    config: TandemConfig
    machines: "RayMachines"
    epochs: EpochCounter
    on_change: Callable[[], None]
    placement: Placement | None = None
    """Expert placement of later epochs; None: the default placement."""
    history: RestartHistory = RestartHistory()
    weights: ClusterWeights = field(default_factory=ClusterWeights)
    is_draining: bool = field(default=False, init=False)
    """Whether the gang gets no new sequences until it is stopped."""
    _poll_now: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.gang = Gang(name=self.plan.name, kind=self.plan.kind, epoch=0, state=STARTING)
        self.ranks = RankGroup(self.plan, self.config.control, weights=self.weights)

    @property
    def is_supervised(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, ranks: "Sequence[RayRank]" = (), adopted: Sequence[RankState] = ()) -> None:
        """Start supervising the gang.

        If it is supervised already, only its count of failures is reset.

        Args:
            ranks: Processes to adopt; empty to start new ones.
            adopted: States of ``ranks``. If all ranks of an epoch are among them, that epoch
                continues. Otherwise a new epoch starts.
        """
        before = self.history
        self.history = RestartHistory(
            before.has_served, before.stable_at if self.is_supervised else None
        )
        if self.is_supervised:
            return self._update_gang()
        self.ranks.handles = {s.spec.rank: rank for s, rank in zip(adopted, ranks, strict=True)}
        epoch = max((state.spec.epoch for state in adopted), default=self.gang.epoch)
        for state in adopted:
            self.weights.record(self.ranks.handles[state.spec.rank], state.weights)
        if adopted:
            self.ranks.placement_group_epoch = placement_group_epoch_of(adopted[0].spec)
        goes_on = not adopted or is_complete(adopted)
        self._update_gang(epoch=epoch, state=STARTING if goes_on else LOST, failure=None)
        self._task = asyncio.create_task(self._run(), name=f"gang-{self.plan.name}")

    def report(self, epoch: int, reason: str) -> None:
        """Poll the ranks at once because ``epoch`` is suspected to have failed.

        The epoch ends if a rank does not answer.
        """
        if epoch == self.gang.epoch:
            self.ranks.suspicion = reason
            self._poll_now.set()

    def drain(self) -> None:
        """Send no new sequences to the gang until it is stopped."""
        self.is_draining = True
        if self.gang.state == READY:
            self._update_gang(state=DRAINING)

    async def stop(self, deadline_s: float) -> None:
        """Let the ranks stop by themselves within ``deadline_s`` seconds, then kill them."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self.ranks.stop(deadline_s)
        await self._release_placement_group()
        self.is_draining = False
        self._update_gang(state=LOST, members=())

    async def _run(self) -> None:
        pause_s: float | None = 0.0
        if self.gang.state == LOST:
            await self.ranks.leave()
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            try:
                await self._run_epoch()
            except EpochOver as over:
                pause_s = await self._handle_failure(over)
            except Exception as error:
                pause_s = await self._handle_failure(EpochOver(error, *self.ranks.handles))

    async def _run_epoch(self) -> None:
        """Run one epoch until an exception ends it."""
        missing = self.ranks.missing
        if missing or self.gang.state == LOST:
            epoch = self.epochs.next_epoch()
            if not self.ranks.handles:
                self.ranks.placement_group_epoch = epoch
            starts = (f"{self.plan.name}: waiting for resources",)
            self._update_gang(epoch=epoch, state=STARTING, startup_notes=starts, members=())
            self.ranks.suspicion = ""  # refers to the previous epoch
            launch = EpochLaunch(
                epoch=epoch,
                placement_group_epoch=self.ranks.placement_group_epoch,
                missing=missing,
                placement=self.placement,
            )
            await self.machines.launch_ranks(
                plan=self.plan, launch=launch, config=self.config, ranks=self.ranks.handles
            )
        while True:
            self._poll_now.clear()
            states = await self.ranks.poll_states(self.epochs.seen)
            self._update_gang(startup_notes=self.ranks.startup_notes)
            if states:
                if len(states) > 1 and all(state.is_loaded for state in states):
                    await self.ranks.join(states, self.gang.epoch)
                self._apply_states(states)
            pause_s = STARTING_POLL_S if self.gang.state == STARTING else POLL_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poll_now.wait(), pause_s)

    def _apply_states(self, states: Sequence[RankState]) -> None:
        check_states(states)
        is_ready = all(state.info is not None for state in states)
        if is_ready and self.gang.state == STARTING:
            stable_at = time.monotonic() + self.config.control.failure_reset_s
            self.history = replace(self.history, has_served=True, stable_at=stable_at)
        self._update_gang(
            state=STARTING if not is_ready else DRAINING if self.is_draining else READY,
            members=tuple(state.info for state in states if state.info is not None),
        )

    async def _handle_failure(self, over: EpochOver) -> float | None:
        """Clean up after an epoch.

        Returns the seconds to wait before the next epoch, None if the gang stays down.
        """
        now = time.monotonic()
        states = self.ranks.states
        self.ranks.states = {}
        self.ranks.kill(over.lost_ranks)  # afterwards their logs and journals are complete
        failed = [state for rank, state in states.items() if has_failed(state)]
        dead = [s for r, s in states.items() if r in over.lost_ranks or s in failed]
        async with asyncio.TaskGroup() as tasks:
            reports = asyncio.gather(*map(self.machines.read_crash_report, dead))
            if failed:
                await reports  # a rank that leaves drops the record of its step
            tasks.create_task(self.ranks.leave())
            failed_epoch = EpochFailure(
                over.cause, frozenset(self.ranks.handles), tuple(await reports)
            )
            decision = decide_restart(self.history, failed_epoch, now)
            self._end_epoch(failed_epoch, decision)
        if not self.ranks.handles:
            await self._release_placement_group()
        if decision.pause_s is None:  # last, because from here on the gang may be started again
            self._update_gang(state=DOWN, is_given_up=True)
            return None
        return max(0.0, decision.pause_s - (time.monotonic() - now))

    def _end_epoch(self, failed_epoch: EpochFailure, decision: RestartDecision) -> None:
        """Report the end of the epoch and kill the ranks that the next epoch does not keep."""
        self.history = decision.history
        epoch = self.gang.epoch
        failure = failed_epoch.failure
        log.error(
            "%s: epoch %d ended (%s): %s",
            self.plan.name,
            epoch,
            failed_epoch.category,
            failure.text,
        )
        ended = EpochEnd(epoch, failed_epoch.in_flight)
        num_deaths = self.gang.num_deaths + 1
        fields = {"failure": failure, "epoch_end": ended, "num_deaths": num_deaths}
        self._update_gang(state=LOST, members=(), startup_notes=(), **fields)
        self.ranks.kill(self.ranks.handles.keys() - decision.kept_ranks)

    async def _release_placement_group(self) -> None:
        try:
            await self.machines.release_placement_group(self.plan.name)
        except Exception as error:  # retried at the end of the next epoch
            log.error("%s: its placement group was not removed: %s", self.plan.name, error)

    def _update_gang(self, **fields: object) -> None:
        before = self.gang
        is_over = self.history.num_failures >= self.config.control.max_consecutive_failures
        changes = {"is_given_up": is_over, **fields}
        self.gang = replace(before, **changes)  # type: ignore[arg-type]
        if self.gang != before:
            self.on_change()
