"""The ranks that a gateway uses: always those of the latest membership, nothing else.

New ranks are warmed before they get requests, those found lost are left out until they answer.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Protocol

from tandem.cluster.gateway.frame_reader import listen
from tandem.cluster.gateway.handles import Handle
from tandem.cluster.gateway.liveness import Event, Phase
from tandem.cluster.gateway.retries import Retries
from tandem.cluster.gateway.router import Ranks
from tandem.cluster.gateway.warm_up import SendRequest, WarmUp
from tandem.core.config import TandemConfig
from tandem.core.control import Control
from tandem.core.identity import nonce
from tandem.core.info import COLOCATED, DECODE, PREFILL
from tandem.core.membership import DRAINING, LOST, READY, Gang, InStep, Membership, RankSpec
from tandem.core.tasks import Tasks, cancelled, until

log = logging.getLogger(__name__)
AGAIN_S = 0.1
LONGEST_BEAT_S = RELEASED_S = 1.0
WARM_UP_S = 10.0
"""Time after which a gateway that has a warm pair waits no longer for the other pairs."""


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


class Fleet:
    """Owned by one asyncio loop. ``warm`` sends a request over a new pair, ``session`` is the nonce
    under which its ranks hold what they are asked for."""

    def __init__(self, members: Members, config: TandemConfig, warm: SendRequest) -> None:
        self.session = nonce()
        self.ranks: dict[str, Handle] = {}
        self._members = members
        self._beat_s = min(LONGEST_BEAT_S, config.kv_transfer.lease_s / 4)
        self._stuck_s = config.control.stall_timeout_s
        self._warm = warm
        self._background = Tasks()
        self._listeners: dict[Handle, asyncio.Task[None]] = {}
        self._warm_ups: dict[Ranks, WarmUp] = {}
        self.deaths: deque[InStep] = deque(maxlen=256)
        """The latest steps that a rank died of, as far as is told by now: their answers may be
        elsewhere."""
        self._digest = next((info.model.digest for info in members.membership.ready()), "")
        self._apply(members.membership)
        self._follower = asyncio.create_task(self._follow(), name="membership")

    async def ready(self) -> None:
        """Wait until a pair of ranks is warm and each other pair was tried, or for WARM_UP_S.

        Returns also when no pair is left to be warmed, because the ranks have left the cluster.

        Raises:
            ValueError: No pair of today's ranks can work together.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_UP_S):
                await asyncio.gather(*(pair.tried.wait() for pair in self._warm_ups.values()))
        while self._warm_ups and not any(pair.is_warm for pair in self._warm_ups.values()):
            refusals = [pair.failure for pair in self._warm_ups.values() if pair.is_refused]
            if len(refusals) == len(self._warm_ups) and refusals[0] is not None:
                raise refusals[0]
            await asyncio.sleep(AGAIN_S)

    async def stop(self) -> None:
        """Hear nobody any more. The releases under way are finished, or given up with their rank
        after RELEASED_S."""
        warm_ups = [pair.task for pair in self._warm_ups.values()]
        await cancelled(self._follower, *warm_ups, *self._listeners.values())
        await asyncio.wait([asyncio.create_task(self._background.finish())], timeout=RELEASED_S)

    def of_kind(self, kind: str) -> list[Handle]:
        """The ranks that prefill, or those that decode; a colocated one does both."""
        return [r for r in self.ranks.values() if r.info.spec.kind in (kind, COLOCATED)]

    def unready(self) -> list[Gang]:
        """Gangs that start, are lost or down."""
        return [gang for gang in self.applied.gangs if gang.state not in (READY, DRAINING)]

    def usable(self) -> list[Ranks]:
        """Warm pairs of ranks that cache alike and are not lost."""
        well = {rank for rank in self.ranks.values() if rank.liveness.is_well}
        warm = [pair.ranks for pair in self._warm_ups.values() if pair.is_warm]
        return [ranks for ranks in warm if well.issuperset(ranks)]

    def cold_pairs(self) -> dict[Handle, str]:
        """Return why decode ranks get no requests from some prefill rank, by decode rank."""
        causes: dict[Handle, str] = {}
        for pair in self._warm_ups.values():
            if pair.cause:
                causes.setdefault(pair.ranks[1], pair.cause)
        return causes

    async def pairs(self, patience_s: float) -> list[Ranks]:
        """``usable`` as soon as there is one, or after ``patience_s``."""
        return await until(self.usable, patience_s, AGAIN_S)

    def has_verdict(self, handle: Handle) -> bool:
        """Whether the controller has told what a lost rank died of, or it lives."""
        spec = handle.info.spec
        ends = [gang.ended for gang in self.applied.gangs if gang.name == spec.gang]
        return not handle.liveness.is_out or all(end and end.epoch >= spec.epoch for end in ends)

    def accuse(self, rank: Handle, error: Exception) -> None:
        """A call to it failed: left out until one is answered."""
        if rank.liveness.tell(Event.ACCUSED):
            self._report(rank, error)
            self._background.start(self._ask(rank))

    async def _ask(self, rank: Handle) -> None:
        retries = Retries(LONGEST_BEAT_S)
        while rank.liveness.phase is Phase.SUSPECT and not await rank.is_reachable():
            await retries.pause()
        if rank.liveness.tell(Event.ANSWERED):
            log.warning("%s answers again and gets requests", rank.life)

    def _report(self, rank: Handle, error: Exception) -> None:
        log.warning("%s is lost and gets no requests until it answers: %s", rank.life, error)
        self._members.report(rank.info.spec.gang, rank.info.spec.epoch, str(error))

    async def _follow(self) -> None:
        """Apply every membership. An error costs one of them, never those that follow."""
        while True:
            try:
                self._apply(await self._members.changed(self.applied.version))
            except Exception:
                log.exception("the membership cannot be followed; it is tried again")
                await asyncio.sleep(AGAIN_S)

    def _apply(self, now: Membership) -> None:
        """Let go of ranks that are no more, take in new ones, warm new pairs."""
        now = self.applied = replace(now, gangs=tuple(map(self._of_this_model, now.gangs)))
        infos = {info.spec.life: info for info in now.ready()}
        for name in [name for name in self.ranks if name not in infos]:
            rank = self.ranks.pop(name)
            self._listeners.pop(rank).cancel()
            for ranks in [ranks for ranks in self._warm_ups if rank in ranks]:
                self._warm_ups.pop(ranks).task.cancel()
        for name in [name for name in infos if name not in self.ranks]:
            control = self._members.control(infos[name].spec)
            rank = self.ranks[name] = Handle(infos[name], control, self._background)
            hear = listen(rank, self.session, self._beat_s, self._stuck_s, self._report)
            self._listeners[rank] = asyncio.create_task(hear, name=f"hear-{name}")
        for gang in now.gangs:
            step = gang.ended and gang.ended.in_step
            if step and step not in self.deaths:
                self.deaths.append(step)
            for rank in [r for r in self.ranks.values() if r.info.spec.gang == gang.name]:
                rank.liveness.is_draining = gang.state == DRAINING
        for p, d in product(self.of_kind(PREFILL), self.of_kind(DECODE)):
            # A colocated rank goes with itself alone.
            is_split = COLOCATED not in (p.info.spec.kind, d.info.spec.kind)
            if (p, d) not in self._warm_ups and (p is d or is_split):
                self._warm_ups[p, d] = WarmUp((p, d), self._warm)

    def _of_this_model(self, gang: Gang) -> Gang:
        """Return ``gang``, as one that is lost if it has another model: this gateway's tokenizer
        and limits are not that model's, nor may it continue a begun answer."""
        if not (theirs := {info.model.digest for info in gang.members} - {self._digest}):
            return gang
        cause = f"it has model {', '.join(theirs)}, this server {self._digest}: start this again"
        return replace(gang, state=LOST, members=(), starts=(cause,))
