"""The ranks that a gateway uses, which always follow the latest membership.

New ranks are warmed up before they get requests. Ranks that were found lost get no requests until
they answer.
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
"""Seconds after which a gateway with a warm pair stops waiting for the other pairs."""


class ClusterMembers(Protocol):
    """Cluster membership as a gateway follows it (cluster/control/members.py)."""

    @property
    def membership(self) -> Membership:
        """Latest snapshot. It stays valid while there is no controller."""

    async def wait_for_change(self, after: tuple[int, int]) -> Membership:
        """Return the next snapshot with a version above ``after``."""

    def control(self, spec: RankSpec) -> Control:
        """Return the control channel to a rank in the epoch of ``spec``."""

    def report(self, gang: str, epoch: int, reason: str) -> None:
        """Report a suspected failure to the controller."""


class Fleet:
    """All rank handles, their heartbeats and warm-ups. Owned by one asyncio loop.

    Attributes:
        session: Nonce under which ranks hold resources for this gateway.
        ranks: Handles of the ready ranks, by epoch name.
        fatal_steps: Sequences of recent steps that ended an epoch, as reported by the controller.
            Their answers may already run on other ranks.
    """

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

        self._digest = next((info.model.digest for info in members.membership.ready()), "")
        self._apply_membership(members.membership)
        self._follower = asyncio.create_task(self._follow_membership(), name="membership")

    async def wait_until_warm(self) -> None:
        """Wait until at least one pair of ranks is warm and every other pair has been tried.

        After WARM_UP_TIMEOUT_S, one warm pair is enough. Also returns when no pair is left to warm
        up, because the ranks have left the cluster.

        Raises:
            ValueError: No pair of the present ranks can work together.
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
        """Stop following ranks. Pending releases have STOP_RELEASE_S to finish."""
        warm_ups = [pair.task for pair in self._warm_ups.values()]
        await cancel_and_wait(self._follower, *warm_ups, *self._listeners.values())
        await asyncio.wait([asyncio.create_task(self._background.finish())], timeout=STOP_RELEASE_S)

    def of_kind(self, kind: str) -> list[RankHandle]:
        """Return the ranks of one kind. Colocated ranks count as prefill and as decode ranks."""
        return [r for r in self.ranks.values() if r.info.spec.kind in (kind, COLOCATED)]

    def unready_gangs(self) -> list[Gang]:
        """Return the gangs that are starting, lost or down."""
        return [gang for gang in self.membership.gangs if gang.state not in (READY, DRAINING)]

    def usable_pairs(self) -> list[RankPair]:
        """Return the warm pairs in which both ranks may get requests."""
        well = {rank for rank in self.ranks.values() if rank.liveness.is_well}
        warm = [pair.ranks for pair in self._warm_ups.values() if pair.is_warm]
        return [ranks for ranks in warm if well.issuperset(ranks)]

    def cold_pair_causes(self) -> dict[RankHandle, str]:
        """Return the decode ranks in pairs that are not warm, each with the reason.

        If a decode rank is in several such pairs, the reason is that of the first pair.
        """
        causes: dict[RankHandle, str] = {}
        for pair in self._warm_ups.values():
            if pair.cause:
                causes.setdefault(pair.ranks[1], pair.cause)
        return causes

    async def wait_for_pairs(self, timeout_s: float) -> list[RankPair]:
        """Wait until there are ``usable_pairs``, and return them.

        Returns [] if there are none after ``timeout_s`` seconds.
        """
        return await poll_until(self.usable_pairs, timeout_s, POLL_PERIOD_S)

    def is_cause_known(self, handle: RankHandle) -> bool:
        """Return whether the controller has reported why a rank died.

        Returns True for ranks that are not lost.
        """
        spec = handle.info.spec
        ends = [gang.epoch_end for gang in self.membership.gangs if gang.name == spec.gang]
        return not handle.liveness.is_out or all(end and end.epoch >= spec.epoch for end in ends)

    def mark_suspect(self, rank: RankHandle, error: Exception) -> None:
        """Stop sending requests to a rank after a failed call, until it answers another call."""
        if rank.liveness.apply_event(LivenessEvent.CALL_FAILED):
            self._report(rank, error)
            self._background.start(self._poll_suspect(rank))

    async def _poll_suspect(self, rank: RankHandle) -> None:
        retries = Retries(MAX_HEARTBEAT_PERIOD_S)
        while rank.liveness.phase is LivenessPhase.SUSPECT and not await rank.is_reachable():
            await retries.pause()
        if rank.liveness.apply_event(LivenessEvent.CALL_ANSWERED):
            log.warning("%s answers again; it gets requests again", rank.epoch_name)

    def _report(self, rank: RankHandle, error: Exception) -> None:
        log.warning("%s is lost and gets no requests until it answers: %s", rank.epoch_name, error)
        self._members.report(rank.info.spec.gang, rank.info.spec.epoch, str(error))

    async def _follow_membership(self) -> None:
        """Apply every new membership. One that cannot be applied is skipped, later ones are not."""
        while True:
            try:
                self._apply_membership(await self._members.wait_for_change(self.membership.version))
            except Exception:
                log.exception("the membership could not be applied; trying again")
                await asyncio.sleep(POLL_PERIOD_S)

    def _apply_membership(self, now: Membership) -> None:
        """Drop ranks that have left, add new ones and warm up new pairs."""
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
                rank=rank,
                session=self.session,
                heartbeat_s=self._heartbeat_s,
                stall_timeout_s=self._stall_timeout_s,
                on_lost=self._report,
            )
            self._listeners[rank] = asyncio.create_task(heartbeats, name=f"hear-{name}")
        for gang in now.gangs:
            step = gang.epoch_end and gang.epoch_end.in_flight
            if step and step not in self.fatal_steps:
                self.fatal_steps.append(step)
            for rank in [r for r in self.ranks.values() if r.info.spec.gang == gang.name]:
                rank.liveness.is_draining = gang.state == DRAINING
        for p, d in product(self.of_kind(PREFILL), self.of_kind(DECODE)):
            # A colocated rank forms a pair with itself only.
            is_split = COLOCATED not in (p.info.spec.kind, d.info.spec.kind)
            if (p, d) not in self._warm_ups and (p is d or is_split):
                self._warm_ups[p, d] = WarmUp((p, d), self._send_warm_up)

    def _without_other_model(self, gang: Gang) -> Gang:
        """Return ``gang``, or mark it as lost if it serves another model than this gateway.

        This gateway's tokenizer and limits do not fit another model. Another model must not
        continue a started answer either.
        """
        if not (other_digests := {info.model.digest for info in gang.members} - {self._digest}):
            return gang
        cause = (
            f"the gang serves the model with digest {', '.join(other_digests)}, but this server "
            f"has {self._digest}; restart this server"
        )
        return replace(gang, state=LOST, members=(), startup_notes=(cause,))
