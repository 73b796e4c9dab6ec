"""One gang from life to life: begun, watched, ended, begun again. No Ray in it."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.control.company import Company
from cluster.control.next_life import MISTAKE, NO_ROOM, History, blame, next_life
from cluster.control.plan import Birth, GangPlan
from cluster.control.verdict import LifeOver, cause, check, has_failed
from core.config import TandemConfig
from core.membership import (
    DOWN,
    DRAINING,
    LOST,
    READY,
    STARTING,
    EndedLife,
    Gang,
    RankSpec,
    RankState,
)
from core.placement import Placement
from core.schema import failure_of
from core.tasks import cancelled

if TYPE_CHECKING:
    from cluster.control.controller import Controller
    from cluster.control.machines import RayMachines, RayRank

POLL_S = 1.0
STARTING_POLL_S = 0.2
TOLD_BYTES = 2000
log = logging.getLogger(__name__)


class GangKeeper:
    """Owns the ``ranks`` of one gang, which ``machines`` begin. ``gang`` is what there is to know;
    ``on_change`` is called after it has changed. Epochs, and what ranks are to remember of them,
    come from the ``controller``.

    A life ends with any of its ranks. The others keep process and weights and are in the next one,
    unless they cannot leave this one.
    """

    def __init__(
        self,
        plan: GangPlan,
        config: TandemConfig,
        machines: "RayMachines",
        controller: "Controller",
        on_change: Callable[[], None],
    ) -> None:
        self.gang = Gang(plan.name, plan.kind, 0, STARTING)
        self._plan = plan
        self._config = config
        self._machines = machines
        self._controller = controller
        self._on_change = on_change
        self.placement: Placement | None = None
        """Of experts, in the lives to come; None is the plain order."""
        self._is_draining = False
        control = config.control
        self.ranks = Company(plan.name, plan.num_ranks, control.stuck_s, control.start_s)
        self.history = History()
        self._room = 0
        self._ready_at: float | None = None
        self._look = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, ranks: "Sequence[RayRank]" = (), spec: RankSpec | None = None) -> None:
        """Keep it alive from now on: ``ranks`` of a life that was adopted, of which ``spec`` is
        one, or a new life. One that is kept already only has its deaths forgotten."""
        self.history = replace(self.history, num_deaths=0, num_faults=0)
        if self._task is not None and not self._task.done():
            return self._set(num_deaths=0)
        self.ranks.handles = dict(enumerate(ranks))
        epoch = self.gang.epoch
        if spec is not None:
            epoch, self._room = spec.epoch, spec.room or spec.epoch
        self._set(epoch=epoch, state=STARTING, failure=None, num_deaths=0)
        self._task = asyncio.create_task(self._run(), name=f"keep-{self._plan.name}")

    def report(self, epoch: int, reason: str) -> None:
        """Somebody finds this life suspicious: look now, and end it if it stays silent."""
        if epoch == self.gang.epoch:
            self.ranks.suspicion = reason
            self._look.set()

    def drain(self) -> None:
        """It gets nothing new from now on, until it is stopped."""
        self._is_draining = True
        if self.gang.state == READY:
            self._set(state=DRAINING)

    async def stop(self, deadline_s: float) -> None:
        """Ranks stop by themselves within ``deadline_s`` seconds, then are killed."""
        if self._task is not None:
            await cancelled(self._task)
        await self.ranks.stop(deadline_s)
        await self._clear()
        self._is_draining = False
        self._set(state=LOST, members=())

    async def _run(self) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            try:
                await self._live()
            except Exception as error:
                over = (
                    error if isinstance(error, LifeOver) else LifeOver(error, *self.ranks.handles)
                )
                pause_s = await self._bury(over.cause, over.lost)

    async def _live(self) -> None:
        """One life; returns only by raising what ended it."""
        missing = self.ranks.missing
        if missing or self.gang.state == LOST:
            epoch = self._controller.next_epoch()
            if not self.ranks.handles:
                self._room = epoch
            starts = (f"{self._plan.name}: waiting for room",)
            self._set(epoch=epoch, state=STARTING, starts=starts, members=())
            self.ranks.suspicion = ""  # of the life before
            birth = Birth(epoch, self._room, missing, self.placement)
            begun = await self._machines.begin(self._plan, birth, self._config)
            self.ranks.handles |= begun
        while True:
            self._look.clear()
            states = await self.ranks.ask(self._controller.seen)
            self._set(starts=self.ranks.starts)
            if states:
                if len(states) > 1 and all(state.is_loaded for state in states):
                    await self.ranks.join(states, self.gang.epoch, self._room)
                self._note(states)
            pause_s = POLL_S if self._ready_at else STARTING_POLL_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), pause_s)

    def _note(self, states: Sequence[RankState]) -> None:
        check(states)
        is_ready = all(state.info is not None for state in states)
        if is_ready and self._ready_at is None:
            self._ready_at = time.monotonic()
        self._set(
            state=STARTING if not is_ready else DRAINING if self._is_draining else READY,
            members=tuple(state.info for state in states if state.info is not None),
        )

    async def _bury(self, error: Exception, lost: Collection[int]) -> float | None:
        """The life is over: kill the ``lost`` and have the others leave it. Returns the pause
        before the next one, None if there is none."""
        served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        self._ready_at = None
        states, self.ranks.states = self.ranks.states, {}
        self.ranks.kill(lost)
        guilty = [s for r, s in states.items() if r in lost or has_failed(s)]
        words = await asyncio.gather(*map(self._machines.last_words, guilty))
        why, failure = blame(error, words), failure_of(error)
        min_service_s = self._config.control.min_service_s
        self.history, pause_s = next_life(self.history, why, served_s, min_service_s)
        if why not in (MISTAKE, NO_ROOM):
            tails = "".join(f"\n{said.log[-TOLD_BYTES:].strip()}" for said in words if said.log)
            failure = replace(failure, text=f"{failure.text}{tails}")
        log.error("%s, epoch %d, %s: %s", self._plan.name, self.gang.epoch, why, failure.text)
        ended = EndedLife(self.gang.epoch, cause(error, words))
        told = {"failure": failure, "ended": ended, "num_deaths": self.history.num_deaths}
        self._set(state=LOST, members=(), starts=(), **told)
        if pause_s is None:
            self.ranks.kill(self.ranks.handles)
        await self.ranks.leave()
        if not self.ranks.handles:
            await self._clear()
        if pause_s is None:  # not before: from now on it may be started again
            self._set(state=DOWN)
        return pause_s

    async def _clear(self) -> None:
        try:
            await self._machines.clear(self._plan.name)
        except Exception as error:  # the end of the next life gives this room back too
            log.error("%s: its room could not be given back: %s", self._plan.name, error)

    def _set(self, **fields: object) -> None:
        before, self.gang = self.gang, replace(self.gang, **fields)  # type: ignore[arg-type]
        if self.gang != before:
            self._on_change()
