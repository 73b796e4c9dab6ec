"""One gang from life to life: begun, watched, ended, begun again. No Ray in it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.control.plan import GangPlan
from core.config import TandemConfig
from core.errors import NodeLost, Overloaded, StepFailed
from core.membership import DOWN, LOST, READY, STARTING, EndedLife, Gang, InStep, RankState
from core.schema import failure_of, raise_failure

POLL_S = 1.0
STARTING_POLL_S = 0.2
BACK_OFF_S = 1.0
TOLD_BYTES = 2000
FATAL = "Fatal Python error"
"""How faulthandler begins to tell of a signal that a step may raise: SEGV, ABRT, BUS, FPE, ILL."""
log = logging.getLogger(__name__)


class RankHandle(Protocol):
    """One rank's process, whatever runs it."""

    async def who(self, incarnation: int, epoch: int) -> RankState:
        """Raises NodeLost when it is dead; TimeoutError when that cannot be told now."""

    async def stop(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a dead rank left: the end of its log, and who was in its step."""

    log: str = ""
    in_step: InStep | None = None


class Machines(Protocol):
    """Where ranks are begun and ended."""

    async def begin(self, plan: GangPlan, epoch: int, config: TandemConfig) -> Sequence[RankHandle]:
        """Ranks that build themselves from now on. Raises Overloaded when there is no room."""

    async def last_words(self, state: RankState) -> LastWords:
        """Of a rank that has been killed, from its machine; empty where that cannot be had."""

    async def clear(self, gang: str) -> None:
        """Give back the room of every life of a gang; its ranks have been killed."""


class Numbers(Protocol):
    """Where epochs come from; ``seen`` is the (incarnation, epoch) that ranks are to remember."""

    seen: tuple[int, int]

    def next_epoch(self) -> int: ...


class GangKeeper:
    """Owns the ranks of one gang. ``gang`` is what there is to know; ``on_change`` is called
    after it has changed."""

    def __init__(
        self,
        plan: GangPlan,
        config: TandemConfig,
        machines: Machines,
        numbers: Numbers,
        on_change: Callable[[], None],
    ) -> None:
        self.gang = Gang(plan.name, plan.kind, 0, STARTING)
        self._plan = plan
        self._config = config
        self._machines = machines
        self._numbers = numbers
        self._on_change = on_change
        self._ranks: Sequence[RankHandle] = ()
        self._states: Sequence[RankState] = ()
        self._num_deaths = 0
        self._ready_at: float | None = None
        self._has_served = False
        self._suspicion = ""
        self._look = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, ranks: Sequence[RankHandle] = (), epoch: int = 0) -> None:
        """Keep it alive from now on: ``ranks`` of a life that was adopted, or a new life. A gang
        that is down gets as many tries as at first; a running one is left alone."""
        if self._task is not None and not self._task.done():
            return
        self._ranks, self._num_deaths = ranks, 0
        self._set(epoch=epoch or self.gang.epoch, state=STARTING, failure=None)
        self._task = asyncio.create_task(self._run(), name=f"keep-{self._plan.name}")

    def report(self, epoch: int, reason: str) -> None:
        """Somebody finds this life suspicious: look now, and end it if it stays silent."""
        if epoch == self.gang.epoch:
            self._suspicion = reason
            self._look.set()

    async def stop(self, deadline_s: float) -> None:
        """Ranks stop by themselves within ``deadline_s`` seconds, then are killed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        stops = [asyncio.create_task(rank.stop()) for rank in self._ranks]
        if stops:
            await asyncio.wait(stops, timeout=deadline_s)
        for stop in stops:
            stop.cancel()
        await self._end()
        self._set(state=LOST, members=())

    async def _run(self) -> None:
        while self.gang.state != DOWN:
            try:
                await self._live()
            except Exception as error:
                await self._bury(error)
                if self.gang.state != DOWN:
                    await asyncio.sleep(BACK_OFF_S * 2**self._num_deaths)

    async def _live(self) -> None:
        """One life; returns only by raising what ended it."""
        if not self._ranks:
            epoch = self._numbers.next_epoch()
            self._set(epoch=epoch, state=STARTING, progress=0.0, members=())
            self._ranks = await self._machines.begin(self._plan, epoch, self._config)
        while True:
            self._look.clear()
            suspicion, self._suspicion = self._suspicion, ""
            try:
                async with asyncio.timeout(self._config.control.stuck_s):
                    asked = (rank.who(*self._numbers.seen) for rank in self._ranks)
                    self._note(await asyncio.gather(*asked))
            except TimeoutError:
                suspicion = suspicion or self._suspicion
                if suspicion:
                    silence_s = self._config.control.stuck_s
                    raise NodeLost(f"no answer for {silence_s:g} s: {suspicion}") from None
            pause_s = POLL_S if self._ready_at else STARTING_POLL_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), pause_s)

    def _note(self, states: Sequence[RankState]) -> None:
        self._states = states
        for state in states:
            if state.failure is not None:
                raise_failure(state.failure)
            if state.pace is not None and state.pace.is_stuck:
                raise NodeLost(f"{state.spec.name}: its engine is {state.pace}")
        is_ready = all(state.info is not None for state in states)
        if is_ready and self._ready_at is None:
            self._ready_at, self._has_served = time.monotonic(), True
        self._set(
            state=READY if is_ready else STARTING,
            progress=min(state.progress for state in states),
            members=tuple(state.info for state in states if state.info is not None),
        )

    async def _bury(self, error: Exception) -> None:
        """The life is over: kill what is left of it, and decide whether another one follows.

        The user's mistake is final; so is want of room, unless the gang has served before.
        """
        served_s = time.monotonic() - self._ready_at if self._ready_at else 0.0
        self._ready_at = None
        control, failure = self._config.control, failure_of(error)
        is_full = isinstance(error, Overloaded)
        is_final = isinstance(error, ValueError) or (is_full and not self._has_served)
        if served_s >= control.min_service_s:
            self._num_deaths = 0
        self._num_deaths += not is_full
        self._kill()
        states, self._states = self._states, ()
        words = await asyncio.gather(*map(self._machines.last_words, states))
        if not (is_final or is_full):
            tails = "".join(f"\n{said.log[-TOLD_BYTES:].strip()}" for said in words if said.log)
            failure = replace(failure, text=f"{failure.text}{tails}")
        log.error("%s, epoch %d: %s", self._plan.name, self.gang.epoch, failure.text)
        is_down = is_final or self._num_deaths >= control.max_deaths
        ended = EndedLife(self.gang.epoch, cause(error, words))
        await self._end()
        self._set(state=DOWN if is_down else LOST, members=(), failure=failure, ended=ended)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = ()

    async def _end(self) -> None:
        self._kill()
        try:
            await self._machines.clear(self._plan.name)
        except Exception as error:  # the end of the next life gives this room back too
            log.error("%s: its room could not be given back: %s", self._plan.name, error)

    def _set(self, **fields: object) -> None:
        before, self.gang = self.gang, replace(self.gang, **fields)  # type: ignore[arg-type]
        if self.gang != before:
            self._on_change()


def cause(error: Exception, words: Sequence[LastWords]) -> InStep | None:
    """Who was in the step that ended a life; None if it was no step that did. A killed process, a
    lost machine and silence never count (design.md, Poison)."""
    for said in words:
        if said.in_step is not None and (isinstance(error, StepFailed) or FATAL in said.log):
            return said.in_step
    return None
