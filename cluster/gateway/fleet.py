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

from tandem.cluster.gateway.frame_reader import follow_rank
from tandem.cluster.gateway.handles import RankHandle
from tandem.cluster.gateway.liveness import LivenessEvent, LivenessPhase
from tandem.cluster.gateway.retries import Retries
from tandem.cluster.gateway.router import RankPair
from tandem.cluster.gateway.warm_up import SendRequest, WarmUp
from tandem.core.config import TandemConfig
from tandem.core.control import Control
from tandem.core.identity import new_nonce
from tandem.core.info import COLOCATED, DECODE, PREFILL
from tandem.core.membership import DRAINING, LOST, READY, Gang, InFlightBatch, Membership, RankSpec
from tandem.core.tasks import Tasks, cancel_and_wait, poll_until

log = logging.getLogger(__name__)
POLL_PERIOD_S = 0.1
MAX_HEARTBEAT_PERIOD_S = STOP_RELEASE_S = 1.0
WARM_UP_TIMEOUT_S = 10.0
"""Time after which a gateway that has a warm pair waits no longer for the other pairs."""


class ClusterMembers(Protocol):
    """The cluster's membership as a gateway follows it (cluster/control/members.py)."""

    @property
    def membership(self) -> Membership:
        """The latest snapshot; it serves on while there is no controller."""

    async def wait_for_change(self, after: tuple[int, int]) -> Membership:
        """The next snapshot of a version above ``after``."""

    def control(self, spec: RankSpec) -> Control:
        """Calls to this life of a rank."""

    def report(self, gang: str, epoch: int, reason: str) -> None:
        """Tell the controller of a suspicion."""


class Fleet:
    """Owned by one asyncio loop. ``warm`` sends a request over a new pair, ``session`` is the nonce
    under which its ranks hold what they are asked for."""

    def __init__(
        self, members: ClusterMembers, config: TandemConfig, send_warm_up: SendRequest
    ) -> None:
        self.session = new_nonce()
        self.ranks: dict[str, RankHandle] = {}
        self._members = members
        self._heartbeat_s = min(MAX_HEARTBEAT_PERIOD_S, config.kv_transfer.lease_s / 4)
        self._stall_timeout_s = config.control.stall_timeout_s
        self._send_warm_up = send_warm_up
        self._background = Tasks()
        self._listeners: dict[RankHandle, asyncio.Task[None]] = {}
        self._warm_ups: dict[RankPair, WarmUp] = {}
        self.fatal_steps: deque[InFlightBatch] = deque(maxlen=256)
        """The latest steps that a rank died of, as far as is told by now: their answers may be
        elsewhere."""
        self._digest = next((info.model.digest for info in members.membership.ready()), "")
        self._apply_membership(members.membership)
        self._follower = asyncio.create_task(self._follow_membership(), name="membership")

    async def wait_until_warm(self) -> None:
        """Wait until a pair of ranks is warm and each other pair was tried, or for
        WARM_UP_TIMEOUT_S.

        Returns also when no pair is left to be warmed, because the ranks have left the cluster.

        Raises:
            ValueError: No pair of today's ranks can work together.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                await asyncio.gather(
                    *(pair.first_attempt_done.wait() for pair in self._warm_ups.values())
                )
        while self._warm_ups and not any(pair.is_warm for pair in self._warm_ups.values()):
            refusals = [pair.failure for pair in self._warm_ups.values() if pair.is_refused]
            if len(refusals) == len(self._warm_ups) and refusals[0] is not None:
                raise refusals[0]
            await asyncio.sleep(POLL_PERIOD_S)

    async def stop(self) -> None:
        """Hear nobody any more. The releases under way are finished, or given up with their rank
        after STOP_RELEASE_S."""
        warm_ups = [pair.task for pair in self._warm_ups.values()]
        await cancel_and_wait(self._follower, *warm_ups, *self._listeners.values())
        await asyncio.wait([asyncio.create_task(self._background.finish())], timeout=STOP_RELEASE_S)

    def of_kind(self, kind: str) -> list[RankHandle]:
        """The ranks that prefill, or those that decode; a colocated one does both."""
        return [r for r in self.ranks.values() if r.info.spec.kind in (kind, COLOCATED)]

    def unready_gangs(self) -> list[Gang]:
        """Gangs that start, are lost or down."""
        return [gang for gang in self.membership.gangs if gang.state not in (READY, DRAINING)]

    def usable_pairs(self) -> list[RankPair]:
        """Warm pairs of ranks that cache alike and are not lost."""
        well = {rank for rank in self.ranks.values() if rank.liveness.is_well}
        warm = [pair.ranks for pair in self._warm_ups.values() if pair.is_warm]
        return [ranks for ranks in warm if well.issuperset(ranks)]

    def cold_pair_causes(self) -> dict[RankHandle, str]:
        """Return why decode ranks get no requests from some prefill rank, by decode rank."""
        causes: dict[RankHandle, str] = {}
        for pair in self._warm_ups.values():
            if pair.cause:
                causes.setdefault(pair.ranks[1], pair.cause)
        return causes

    async def wait_for_pairs(self, timeout_s: float) -> list[RankPair]:
        """``usable_pairs`` as soon as there is one, or after ``patience_s``."""
        return await poll_until(self.usable_pairs, timeout_s, POLL_PERIOD_S)

    def is_cause_known(self, handle: RankHandle) -> bool:
        """Whether the controller has told what a lost rank died of, or it lives."""
        spec = handle.info.spec
        ends = [gang.epoch_end for gang in self.membership.gangs if gang.name == spec.gang]
        return not handle.liveness.is_out or all(end and end.epoch >= spec.epoch for end in ends)

    def mark_suspect(self, rank: RankHandle, error: Exception) -> None:
        """A call to it failed: left out until one is answered."""
        if rank.liveness.apply_event(LivenessEvent.CALL_FAILED):
            self._report(rank, error)
            self._background.start(self._poll_suspect(rank))

    async def _poll_suspect(self, rank: RankHandle) -> None:
        retries = Retries(MAX_HEARTBEAT_PERIOD_S)
        while rank.liveness.phase is LivenessPhase.SUSPECT and not await rank.is_reachable():
            await retries.pause()
        if rank.liveness.apply_event(LivenessEvent.CALL_ANSWERED):
            log.warning("%s answers again and gets requests", rank.epoch_name)

    def _report(self, rank: RankHandle, error: Exception) -> None:
        log.warning("%s is lost and gets no requests until it answers: %s", rank.epoch_name, error)
        self._members.report(rank.info.spec.gang, rank.info.spec.epoch, str(error))

    async def _follow_membership(self) -> None:
        """Apply every membership. An error costs one of them, never those that follow."""
        while True:
            try:
                self._apply_membership(await self._members.wait_for_change(self.membership.version))
            except Exception:
                log.exception("the membership cannot be followed; it is tried again")
                await asyncio.sleep(POLL_PERIOD_S)

    def _apply_membership(self, now: Membership) -> None:
        """Let go of ranks that are no more, take in new ones, warm new pairs."""
        now = self.membership = replace(now, gangs=tuple(map(self._without_other_model, now.gangs)))
        infos = {info.spec.epoch_name: info for info in now.ready()}
        for name in [name for name in self.ranks if name not in infos]:
            rank = self.ranks.pop(name)
            self._listeners.pop(rank).cancel()
            for ranks in [ranks for ranks in self._warm_ups if rank in ranks]:
                self._warm_ups.pop(ranks).task.cancel()
        for name in [name for name in infos if name not in self.ranks]:
            control = self._members.control(infos[name].spec)
            rank = self.ranks[name] = RankHandle(infos[name], control, self._background)
            heartbeats = follow_rank(
                rank, self.session, self._heartbeat_s, self._stall_timeout_s, self._report
            )
            self._listeners[rank] = asyncio.create_task(heartbeats, name=f"hear-{name}")
        for gang in now.gangs:
            step = gang.epoch_end and gang.epoch_end.in_flight
            if step and step not in self.fatal_steps:
                self.fatal_steps.append(step)
            for rank in [r for r in self.ranks.values() if r.info.spec.gang == gang.name]:
                rank.liveness.is_draining = gang.state == DRAINING
        for p, d in product(self.of_kind(PREFILL), self.of_kind(DECODE)):
            # A colocated rank goes with itself alone.
            is_split = COLOCATED not in (p.info.spec.kind, d.info.spec.kind)
            if (p, d) not in self._warm_ups and (p is d or is_split):
                self._warm_ups[p, d] = WarmUp((p, d), self._send_warm_up)

    def _without_other_model(self, gang: Gang) -> Gang:
        """Return ``gang``, as one that is lost if it has another model: this gateway's tokenizer
        and limits are not that model's, nor may it continue a begun answer."""
        if not (other_digests := {info.model.digest for info in gang.members} - {self._digest}):
            return gang
        cause = (
            f"it has model {', '.join(other_digests)}, this server {self._digest}: start this again"
        )
        return replace(gang, state=LOST, members=(), startup_notes=(cause,))
