"""One gang from life to life: begun, watched, ended, begun again. No Ray in it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tandem.cluster.control.company import Company
from tandem.cluster.control.next_life import Decision, History, next_life
from tandem.cluster.control.plan import Birth, GangPlan, is_whole, room_of
from tandem.cluster.control.verdict import Death, LifeOver, check, has_failed
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import TandemConfig
from tandem.core.membership import DOWN, DRAINING, LOST, READY, STARTING, EndedLife, Gang, RankState
from tandem.core.placement import Placement
from tandem.core.tasks import cancelled

if TYPE_CHECKING:
    from tandem.cluster.control.machines import RayMachines, RayRank

POLL_S = 1.0
STARTING_POLL_S = 0.2
log = logging.getLogger(__name__)


class Epochs:
    """Numbers that no two lives of any gang have in common. ``seen`` is (incarnation of the
    controller, latest epoch): both go on from the largest that any rank has seen, and from the wall
    clock's milliseconds where none has: a cluster that is started after another one was stopped
    knows nothing of that one's lives, of which many may have begun within a second."""

    def __init__(self) -> None:
        self.seen = (0, 0)

    def next_epoch(self) -> int:
        incarnation, epoch = self.seen
        self.seen = incarnation, max(epoch + 1, int(time.time() * 1000))
        return self.seen[1]


@dataclass(eq=False)
class GangKeeper:
    """Owns the ``ranks`` of one gang, which ``machines`` begin. ``gang`` is what there is to know;
    ``on_change`` is called after it has changed. Ranks are to remember what ``epochs`` are told.

    A life ends with any of its ranks. The others keep process and weights and are in the next one,
    unless they cannot leave this one.
    """

    plan: GangPlan
    config: TandemConfig
    machines: "RayMachines"
    epochs: Epochs
    on_change: Callable[[], None]
    placement: Placement | None = None
    """Of experts, in the lives to come; None is the plain order."""
    history: History = History()
    weights: ClusterWeights = field(default_factory=ClusterWeights)
    is_draining: bool = field(default=False, init=False)
    """It gets nothing new until it is stopped."""
    _look: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.gang = Gang(self.plan.name, self.plan.kind, 0, STARTING)
        self.ranks = Company(self.plan, self.config.control, weights=self.weights)

    @property
    def is_kept(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, ranks: "Sequence[RayRank]" = (), life: Sequence[RankState] = ()) -> None:
        """Keep it alive from now on: the ``life`` of ``ranks`` that were adopted, a new one with
        those that are left of it, or without. One that is kept already only has its deaths
        forgotten."""
        before = self.history
        self.history = History(before.has_served, before.proven_at if self.is_kept else None)
        if self.is_kept:
            return self._set()
        self.ranks.handles = {s.spec.rank: rank for s, rank in zip(life, ranks, strict=True)}
        epoch = max((state.spec.epoch for state in life), default=self.gang.epoch)
        for state in life:
            self.weights.hold(self.ranks.handles[state.spec.rank], state.weights)
        if life:
            self.ranks.room = room_of(life[0].spec)
        goes_on = not life or is_whole(life)
        self._set(epoch=epoch, state=STARTING if goes_on else LOST, failure=None)
        self._task = asyncio.create_task(self._run(), name=f"keep-{self.plan.name}")

    def report(self, epoch: int, reason: str) -> None:
        """Somebody finds this life suspicious: look now, and end it if it stays silent."""
        if epoch == self.gang.epoch:
            self.ranks.suspicion = reason
            self._look.set()

    def drain(self) -> None:
        """It gets nothing new from now on, until it is stopped."""
        self.is_draining = True
        if self.gang.state == READY:
            self._set(state=DRAINING)

    async def stop(self, deadline_s: float) -> None:
        """Ranks stop by themselves within ``deadline_s`` seconds, then are killed."""
        if self._task is not None:
            await cancelled(self._task)
        await self.ranks.stop(deadline_s)
        await self._clear()
        self.is_draining = False
        self._set(state=LOST, members=())

    async def _run(self) -> None:
        pause_s: float | None = 0.0
        if self.gang.state == LOST:
            await self.ranks.leave()
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            try:
                await self._live()
            except LifeOver as over:
                pause_s = await self._bury(over)
            except Exception as error:
                pause_s = await self._bury(LifeOver(error, *self.ranks.handles))

    async def _live(self) -> None:
        """One life; returns only by raising what ended it."""
        missing = self.ranks.missing
        if missing or self.gang.state == LOST:
            epoch = self.epochs.next_epoch()
            if not self.ranks.handles:
                self.ranks.room = epoch
            starts = (f"{self.plan.name}: waiting for room",)
            self._set(epoch=epoch, state=STARTING, starts=starts, members=())
            self.ranks.suspicion = ""  # of the life before
            birth = Birth(epoch, self.ranks.room, missing, self.placement)
            await self.machines.begin(self.plan, birth, self.config, self.ranks.handles)
        while True:
            self._look.clear()
            states = await self.ranks.ask(self.epochs.seen)
            self._set(starts=self.ranks.starts)
            if states:
                if len(states) > 1 and all(state.is_loaded for state in states):
                    await self.ranks.join(states, self.gang.epoch)
                self._note(states)
            pause_s = STARTING_POLL_S if self.gang.state == STARTING else POLL_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), pause_s)

    def _note(self, states: Sequence[RankState]) -> None:
        check(states)
        is_ready = all(state.info is not None for state in states)
        if is_ready and self.gang.state == STARTING:
            proven_at = time.monotonic() + self.config.control.failure_reset_s
            self.history = replace(self.history, has_served=True, proven_at=proven_at)
        self._set(
            state=STARTING if not is_ready else DRAINING if self.is_draining else READY,
            members=tuple(state.info for state in states if state.info is not None),
        )

    async def _bury(self, over: LifeOver) -> float | None:
        """Do as the end of this life asks for; returns the pause before the next one."""
        now = time.monotonic()
        states, self.ranks.states = self.ranks.states, {}
        self.ranks.kill(over.lost)  # what they leave is whole
        failed = [state for rank, state in states.items() if has_failed(state)]
        guilty = [s for r, s in states.items() if r in over.lost or s in failed]
        async with asyncio.TaskGroup() as tasks:
            words = asyncio.gather(*map(self.machines.last_words, guilty))
            if failed:
                await words  # who leaves forgets its step
            tasks.create_task(self.ranks.leave())
            death = Death(over.cause, frozenset(self.ranks.handles), tuple(await words))
            decision = next_life(self.history, death, now)
            self._end_life(death, decision)
        if not self.ranks.handles:
            await self._clear()
        if decision.pause_s is None:  # not before: from now on it may be started again
            self._set(state=DOWN, is_given_up=True)
            return None
        return max(0.0, decision.pause_s - (time.monotonic() - now))

    def _end_life(self, death: Death, decision: Decision) -> None:
        """Report the end of this life and kill the ranks that the next one does not keep."""
        self.history, epoch, failure = decision.history, self.gang.epoch, death.failure
        log.error("%s, epoch %d, %s: %s", self.plan.name, epoch, death.why, failure.text)
        ended = EndedLife(epoch, death.in_step)
        num_deaths = self.gang.num_deaths + 1
        told = {"failure": failure, "ended": ended, "num_deaths": num_deaths}
        self._set(state=LOST, members=(), starts=(), **told)
        self.ranks.kill(self.ranks.handles.keys() - decision.kept)

    async def _clear(self) -> None:
        try:
            await self.machines.clear(self.plan.name)
        except Exception as error:  # the end of the next life gives this room back too
            log.error("%s: its room could not be given back: %s", self.plan.name, error)

    def _set(self, **fields: object) -> None:
        before, is_over = (
            self.gang,
            self.history.num_deaths >= self.config.control.max_consecutive_failures,
        )
        told = {"is_given_up": is_over, **fields}
        self.gang = replace(before, **told)  # type: ignore[arg-type]
        if self.gang != before:
            self.on_change()
