"""The ranks that a gateway uses: always those of the latest membership, nothing else.

New ranks are warmed before they get requests, those found lost are left out until they answer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Set
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from cluster.gateway.frame_reader import LONGEST_PAUSE_S, listen
from cluster.gateway.handles import Handle
from cluster.gateway.retries import Retries
from cluster.gateway.router import Ranks
from core.config import TandemConfig
from core.control import Control
from core.identity import Identity, nonce
from core.info import COLOCATED, DECODE, PREFILL
from core.membership import DRAINING, READY, Gang, InStep, Membership, RankSpec
from core.tasks import cancelled

log = logging.getLogger(__name__)
HEAR, PROBE, WARM_UP = "hear", "probe", "warm-up"
LOOK_S, WAIT_S = 0.05, 0.2
LONGEST_BEAT_S = 1.0
VERDICT_S = 3.0
"""How long an answer waits to learn what a rank died of before it goes on elsewhere."""


class Members(Protocol):
    """The cluster's membership as a gateway follows it (cluster/control/members.py)."""

    @property
    def membership(self) -> Membership:
        """The latest snapshot; it serves on while there is no controller."""

    async def changed(self, after: tuple[int, int]) -> Membership:
        """The next snapshot of a version above ``after``."""

    def control(self, spec: RankSpec) -> Control:
        """Calls to this life of a rank."""

    def report(self, gang: str, epoch: int, reason: str) -> None:
        """Tell the controller of a suspicion."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where an attempt runs; the same rank twice in colocated mode. One that ``is_suspect`` begins
    in steps of its own."""

    prefill: Handle
    decode: Handle
    identity: Identity
    is_suspect: bool = False

    @property
    def names(self) -> tuple[str, str]:
        return self.prefill.name, self.decode.name


class Fleet:
    """Owned by one asyncio loop. ``warm`` sends a request over a new pair, ``session`` is the nonce
    under which its ranks hold what they are asked for."""

    def __init__(
        self, members: Members, config: TandemConfig, warm: Callable[[Pair], Awaitable[None]]
    ) -> None:
        self.session = nonce()
        self.ranks: dict[str, Handle] = {}
        self._members = members
        self._beat_s = min(LONGEST_BEAT_S, config.kv_transfer.lease_s / 4)
        self._stuck_s = config.control.stuck_s
        self._warm = warm
        self._tasks: dict[tuple[str, ...], asyncio.Task[None]] = {}
        """By what they do and the names of the ranks that they do it for."""
        self._deaths: deque[InStep] = deque(maxlen=256)
        """The latest: when one is told of, its answers may be elsewhere."""
        self._apply(members.membership)
        self._follower = asyncio.create_task(self._follow(), name="membership")

    async def ready(self) -> None:
        """Every pair of today's ranks is warm. Raises what kept one from it."""
        await asyncio.gather(*(task for key, task in self._tasks.items() if key[0] == WARM_UP))

    async def stop(self) -> None:
        await cancelled(self._follower, *self._tasks.values())

    def of_kind(self, kind: str) -> list[Handle]:
        """The ranks that prefill, or those that decode; a colocated one does both."""
        return [r for r in self.ranks.values() if r.info.spec.kind in (kind, COLOCATED)]

    def unready(self) -> list[Gang]:
        """Gangs that start, are lost or down."""
        gangs = self._members.membership.gangs
        return [gang for gang in gangs if gang.state not in (READY, DRAINING)]

    def usable(self) -> list[Ranks]:
        """Warm pairs of ranks that cache alike and are not lost."""
        return [
            (p, d)
            for p, d in self._pairs()
            if _has_succeeded(self._tasks[WARM_UP, p.name, d.name]) and p.is_well and d.is_well
        ]

    async def pairs(self, patience_s: float) -> list[Ranks]:
        """``usable`` as soon as there is one, or after ``patience_s``."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + patience_s
        while not (pairs := self.usable()) and now() < give_up_at:
            await asyncio.sleep(WAIT_S)
        return pairs

    async def verdict(self, handle: Handle) -> None:
        """The controller has told what a lost rank died of; not waited for if it lives, nor for
        longer than VERDICT_S."""
        spec, now = handle.info.spec, asyncio.get_running_loop().time
        give_up_at = now() + VERDICT_S
        # Not whether it is heard: a call may learn of its death before a heartbeat does.
        while handle.is_out and now() < give_up_at:
            gangs = [gang for gang in self._applied.gangs if gang.name == spec.gang]
            if all(gang.ended and gang.ended.epoch >= spec.epoch for gang in gangs):
                return
            await asyncio.sleep(LOOK_S)

    def deaths(self, identities: Set[Identity]) -> list[InStep]:
        """The steps with one of these in them that a rank died of, as far as is told by now."""
        return [step for step in self._deaths if not identities.isdisjoint(step.identities)]

    def lose(self, handle: Handle, error: BaseException) -> None:
        """It was found lost: left out until it answers, and asked from now on."""
        if handle.is_out or handle.name not in self.ranks:
            return
        log.warning("%s is lost and gets no requests until it answers: %s", handle.name, error)
        handle.is_out = True
        spec = handle.info.spec
        self._members.report(spec.gang, spec.epoch, str(error))
        self._start(self._probe(handle), PROBE, handle.name)

    async def _probe(self, handle: Handle) -> None:
        retries = Retries(LONGEST_PAUSE_S)
        while handle.is_out:
            try:
                await handle.status()
                handle.is_out = False
                log.warning("%s answers again and gets requests", handle.name)
            except Exception as error:
                log.debug("%s does not answer: %r", handle.name, error)
                await retries.pause()

    async def _follow(self) -> None:
        while True:
            self._apply(await self._members.changed(self._applied.version))

    def _apply(self, now: Membership) -> None:
        """Let go of ranks that are no more, take in new ones, warm new pairs."""
        self._applied = now
        infos = {info.spec.name: info for info in now.ready()}
        for name in self.ranks.keys() - infos.keys():
            del self.ranks[name]
            for key in [key for key in self._tasks if name in key]:
                self._tasks.pop(key).cancel()
        for name in infos.keys() - self.ranks.keys():
            handle = self.ranks[name] = Handle(infos[name], self._members.control(infos[name].spec))
            hear = listen(handle, self.session, self._beat_s, self._stuck_s, self.lose)
            self._start(hear, HEAR, name)
        for gang in now.gangs:
            step = gang.ended and gang.ended.in_step
            if step and step not in self._deaths:
                self._deaths.append(step)
            for info in gang.members:
                if info.spec.name in self.ranks:
                    self.ranks[info.spec.name].is_draining = gang.state == DRAINING
        for p, d in self._pairs():
            if (WARM_UP, p.name, d.name) not in self._tasks:
                self._start(self._warm_up(p, d), WARM_UP, p.name, d.name)

    def _pairs(self) -> list[Ranks]:
        """Ranks that cache alike; a colocated one goes with itself alone."""
        return [
            (p, d)
            for p, d in product(self.of_kind(PREFILL), self.of_kind(DECODE))
            if p.info.fingerprint == d.info.fingerprint
            and (p is d or COLOCATED not in (p.info.spec.kind, d.info.spec.kind))
        ]

    def _start(self, work: Coroutine[Any, Any, None], *key: str) -> None:
        self._tasks[key] = asyncio.create_task(work, name="-".join(key))

    async def _warm_up(self, p: Handle, d: Handle) -> None:
        """Channels and first calls are slow, and no user shall wait for them."""
        retries = Retries(LONGEST_PAUSE_S)
        while True:
            try:
                await p.is_heard.wait()
                await d.is_heard.wait()
                await self._warm(Pair(p, d, Identity("warm-up")))
                return
            except ValueError:
                raise
            except Exception as error:
                log.warning("%s and %s do not work together yet: %s", p.name, d.name, error)
            await retries.pause()


def _has_succeeded(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
