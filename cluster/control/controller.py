"""The actor that supervises every gang. It is detached, and Ray restarts it.

Ranks are detached too: they survive the end of a gateway or of this actor. The controller derives
its state from the ranks, so it needs no storage.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import ray

from tandem.cluster.control.drain import drain_and_restart
from tandem.cluster.control.gang_supervisor import POLL_S, EpochCounter, GangSupervisor
from tandem.cluster.control.machines import (
    RayMachines,
    RayRank,
    find_draining_gangs,
    find_ranks,
    remove_placement_groups,
)
from tandem.cluster.control.plan import adoptable_ranks, plan_gangs
from tandem.cluster.control.rebalance import rebalance_gang
from tandem.cluster.control.restart_policy import RestartHistory
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import TandemConfig
from tandem.core.config_shared import config_differences, parse_shared_config, shared_digest
from tandem.core.errors import TandemError
from tandem.core.membership import Membership
from tandem.core.schema import encode_failure, pack
from tandem.core.tasks import Tasks, run_in_thread, run_periodically

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)
ADOPTION_TIMEOUT_S = 10.0
"""Seconds after which a rank that does not answer is not adopted."""


class Controller:
    """Owner of the gangs of one cluster.

    Ray keeps ``proof_key`` and passes it to every restart of this actor, so that it stays the same
    for the whole lifetime of the cluster.
    """

    def __init__(self, proof_key: bytes = b"") -> None:
        self._proof_key = proof_key
        self._epochs = EpochCounter()
        self._weights = ClusterWeights()
        self._config: TandemConfig | None = None
        self._gangs: dict[str, GangSupervisor] = {}
        self._snapshot = Membership((0, 0))
        self._snapshot_changed = asyncio.Event()
        self._adoption_lock = asyncio.Lock()
        self._change_lock = asyncio.Lock()
        self._background = Tasks()
        self._relocating_gangs = set[str]()
        # Adopt now: gangs need supervision, but the first call after a restart may come late.
        try:
            ray.get_runtime_context().current_actor.ensure_adopted.remote()
        except Exception:  # Ray never restarts an actor whose creation failed
            log.exception(
                "adopting existing ranks is delayed until the first call to the controller"
            )

    async def ensure_adopted(self) -> None:
        """Adopt the ranks that exist already, once. Retry until it succeeds.

        Other calls wait until it has succeeded.
        """
        async with self._adoption_lock:
            while self._epochs.seen[0] == 0:
                try:
                    await self._adopt_ranks()
                except Exception:
                    log.exception("adopting existing ranks failed; trying again")
                    await asyncio.sleep(POLL_S)

    async def attach(self, config_json: str) -> bytes:
        """Start all gangs that are down or not running, and return the packed Membership.

        If the configuration differs from the running cluster's, a packed ValueError names each key
        that differs.
        """
        await self.ensure_adopted()
        try:
            async with self._change_lock:
                await self._attach(parse_shared_config(config_json))
                return pack(self._snapshot)
        except ValueError as error:
            return encode_failure(error)

    async def membership(self, incarnation: int, counter: int, wait_s: float) -> bytes:
        """Return the packed Membership once its version is above (``incarnation``, ``counter``).

        After ``wait_s`` seconds the current one is returned, whatever its version.
        """
        await self.ensure_adopted()
        if incarnation > self._epochs.seen[0]:  # no rank survived, and the clock was set back
            self._epochs.seen = incarnation + 1, self._epochs.seen[1]
            self._publish()
        if self._snapshot.version <= (incarnation, counter):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._snapshot_changed.wait(), wait_s)
        return pack(self._snapshot)

    async def report(self, gang: str, epoch: int, reason: str) -> None:
        """Handle a gateway's suspicion that a gang's epoch has failed.

        The gang's ranks are polled at once. Those that do not answer are lost.
        """
        await self.ensure_adopted()
        if gang in self._gangs:
            self._gangs[gang].report(epoch, reason)

    async def rebalance(self, gang: str) -> bytes:
        """Rebalance a gang. Returns a packed RebalanceResult or Failure."""
        await self.ensure_adopted()
        try:
            if gang not in self._gangs:
                raise ValueError(f"gang={gang!r}: does not exist; use one of {[*self._gangs]}")
            return pack(await rebalance_gang(self._gangs[gang], self._change_lock))
        except (ValueError, TandemError) as error:
            return encode_failure(error)

    async def stop(self, deadline_s: float) -> None:
        """End every rank within ``deadline_s`` seconds and remove the placement groups."""
        await self.ensure_adopted()
        async with self._change_lock:
            await self._stop(deadline_s)

    async def _attach(self, config: TandemConfig) -> None:
        differing = [] if self._config is None else config_differences(self._config, config)
        if differing and not self._may_be_replaced():
            raise ValueError(
                f"config: differs from that of the running cluster: {'; '.join(differing)}; "
                "use the same values, or stop that cluster with `tandem stop`"
            )
        if differing:
            await self._stop(config.control.stop_timeout_s)
        if self._config is None:
            self._configure(config)
        for supervisor in self._gangs.values():
            supervisor.start()

    async def _stop(self, deadline_s: float) -> None:
        await asyncio.gather(*(supervisor.stop(deadline_s) for supervisor in self._gangs.values()))
        self._gangs = {}
        self._config = None
        self._publish()

    def _may_be_replaced(self) -> bool:
        """Return whether another configuration may replace the current one.

        This requires that no gang has ever served and at least one was given up. No gateway relies
        on the configuration then.
        """
        has_served = any(supervisor.history.has_served for supervisor in self._gangs.values())
        return not has_served and any(gang.is_given_up for gang in self._snapshot.gangs)

    def _configure(self, config: TandemConfig) -> None:
        self._config = config
        machines = RayMachines()
        self._gangs = {
            plan.name: GangSupervisor(
                plan=plan,
                config=config,
                machines=machines,
                epochs=self._epochs,
                on_change=self._publish,
                weights=self._weights,
            )
            for plan in plan_gangs(config)
        }
        self._publish()

    async def _adopt_ranks(self) -> None:
        """Adopt the live ranks of every gang of the latest configuration; end all other ranks."""
        ranks = await asyncio.to_thread(find_ranks)
        answers = await asyncio.gather(
            *(_answer_or_none(rank, rank.get_state(0, 0, None)) for rank in ranks)
        )
        ranks_by_name = {
            rank.name: rank for rank, state in zip(ranks, answers, strict=True) if state
        }
        states = [state for state in answers if state is not None]
        configs = {
            text: _parse_config(text) for text in dict.fromkeys(s.config_json for s in states)
        }
        gangs = adoptable_ranks(
            [state for state in states if configs[state.config_json] is not None]
        )
        adopted = [state for gang in gangs.values() for state in gang]
        names = {state.spec.process_name for state in adopted}
        for rank in [rank for rank in ranks if rank.name not in names]:
            log.warning("%s belongs to no gang that can be adopted; killing it", rank.name)
            rank.kill()
        await asyncio.to_thread(remove_placement_groups, [state.spec for state in adopted])
        placed = {}
        for gang, (first, *_) in gangs.items():
            if first.placement:
                rank = ranks_by_name[first.spec.process_name]
                placed[gang] = await _answer_or_none(rank, rank.placement())
        # No code below may fail, because seen[0] > 0 marks adoption as complete.
        incarnation = max(int(time.time()), *(1 + state.max_seen[0] for state in states), 1)
        self._epochs.seen = incarnation, max((state.max_seen[1] for state in states), default=0)
        if adopted and (config := configs[adopted[0].config_json]) is not None:
            self._configure(config)
        for name, supervisor in self._gangs.items():
            found = gangs.get(name, [])
            # If it is unknown, new ranks get another placement, which ends the epoch.
            supervisor.placement = placed.get(name)
            supervisor.history = RestartHistory(has_served=True)
            supervisor.start([ranks_by_name[state.spec.process_name] for state in found], found)
        self._publish()
        self._background.start(run_periodically(POLL_S, self._relocate_gangs))

    async def _relocate_gangs(self) -> None:
        """Move gangs away from machines that Ray drains."""
        for name in (
            await run_in_thread(find_draining_gangs) & self._gangs.keys()
        ) - self._relocating_gangs:
            log.warning("%s: Ray is draining a machine of this gang; moving the gang away", name)
            self._relocating_gangs.add(name)
            self._background.start(self._relocate(name, self._gangs[name]))

    async def _relocate(self, name: str, supervisor: GangSupervisor) -> None:
        try:
            await drain_and_restart(supervisor, self._change_lock, supervisor.placement)
        finally:
            self._relocating_gangs.discard(name)

    def _publish(self) -> None:
        gangs = tuple(supervisor.gang for supervisor in self._gangs.values())
        version = self._epochs.seen[0], self._snapshot.version[1] + 1
        config = "" if self._config is None else shared_digest(self._config)
        self._snapshot = Membership(
            version=version, gangs=gangs, config=config, proof_key=self._proof_key
        )
        self._snapshot_changed.set()
        self._snapshot_changed = asyncio.Event()


def _parse_config(config_json: str) -> TandemConfig | None:
    """Parse a rank's configuration; None if it is from another release."""
    try:
        return parse_shared_config(config_json)
    except ValueError as error:
        log.warning("a rank cannot be adopted: %s", error)
        return None


async def _answer_or_none(rank: RayRank, answer: Awaitable[Answer]) -> Answer | None:
    """Await a rank's reply; None if the rank is dead or does not answer."""
    try:
        async with asyncio.timeout(ADOPTION_TIMEOUT_S):
            return await answer
    except (TandemError, TimeoutError) as error:
        log.warning("%s does not answer, so it might not be adopted: %s", rank.name, error)
        return None
