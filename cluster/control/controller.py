"""The actor that keeps every gang alive. It is detached and restarts by itself.

Ranks are detached too: neither a gateway nor this actor takes them along when it dies. What it
knows it has from them, so it needs no storage of its own.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import ray

from tandem.cluster.control.drain import renew
from tandem.cluster.control.gang import POLL_S, Epochs, GangKeeper
from tandem.cluster.control.machines import RayMachines, RayRank, find_ranks, leaving, remove_groups
from tandem.cluster.control.next_life import History
from tandem.cluster.control.plan import living, plan_gangs
from tandem.cluster.control.rebalance import rebalance_gang
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import TandemConfig
from tandem.core.config_shared import differences, received, shared_digest
from tandem.core.errors import TandemError
from tandem.core.membership import Membership
from tandem.core.schema import encode_failure, pack
from tandem.core.tasks import Tasks, again, in_thread

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)
SILENCE_S = 10.0
"""A rank that says nothing for this long is not adopted."""


class Controller:
    """Owns the gangs of one cluster. Ray keeps ``proof_key`` and passes it to every restart of this
    actor, so the key is the same for as long as the cluster lasts."""

    def __init__(self, proof_key: bytes = b"") -> None:
        self._proof_key = proof_key
        self._epochs = Epochs()
        self._weights = ClusterWeights()
        self._config: TandemConfig | None = None
        self._gangs: dict[str, GangKeeper] = {}
        self._snapshot = Membership((0, 0))
        self._changed = asyncio.Event()
        self._adopting = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._background = Tasks()
        self._moving = set[str]()
        # Nobody may ask for a long time after a restart, and gangs die meanwhile.
        try:
            ray.get_runtime_context().current_actor.begin.remote()
        except Exception:  # Ray never restarts an actor whose creation failed
            log.exception("what is there is adopted with the first call only")

    async def begin(self) -> None:
        """Adopt what is there, once: every other call waits for it, also while it fails."""
        async with self._adopting:
            while self._epochs.seen[0] == 0:
                try:
                    await self._adopt()
                except Exception:
                    log.exception("what is there cannot be adopted yet")
                    await asyncio.sleep(POLL_S)

    async def attach(self, config_json: str) -> bytes:
        """The packed Membership; starts the gangs if nobody has, and again those that are down.

        A packed ValueError names each key that differs from the running cluster's.
        """
        await self.begin()
        try:
            async with self._changing:
                await self._attach(received(config_json))
                return pack(self._snapshot)
        except ValueError as error:
            return encode_failure(error)

    async def membership(self, incarnation: int, counter: int, wait_s: float) -> bytes:
        """The packed Membership, as soon as it is newer than that version or ``wait_s`` is over."""
        await self.begin()
        if incarnation > self._epochs.seen[0]:  # no rank lived to tell, and the clock was set back
            self._epochs.seen = incarnation + 1, self._epochs.seen[1]
            self._publish()
        if self._snapshot.version <= (incarnation, counter):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        return pack(self._snapshot)

    async def report(self, gang: str, epoch: int, reason: str) -> None:
        """A gateway suspects a gang's life: look whether its ranks still answer."""
        await self.begin()
        if gang in self._gangs:
            self._gangs[gang].report(epoch, reason)

    async def rebalance(self, gang: str) -> bytes:
        """Packed Rebalanced, or why not."""
        await self.begin()
        try:
            if gang not in self._gangs:
                raise ValueError(f"gang={gang!r}: there is none; known are {[*self._gangs]}")
            return pack(await rebalance_gang(self._gangs[gang], self._changing))
        except (ValueError, TandemError) as error:
            return encode_failure(error)

    async def stop(self, deadline_s: float) -> None:
        """End every rank within ``deadline_s`` seconds, and give back their room."""
        await self.begin()
        async with self._changing:
            await self._stop(deadline_s)

    async def _attach(self, config: TandemConfig) -> None:
        differing = [] if self._config is None else differences(self._config, config)
        if differing and not self._may_be_replaced():
            raise ValueError(
                f"config: a cluster runs in this Ray, and {'; '.join(differing)}: use its values, "
                "or stop it with `tandem stop`"
            )
        if differing:
            await self._stop(config.control.stop_timeout_s)
        if self._config is None:
            self._configure(config)
        for keeper in self._gangs.values():
            keeper.start()

    async def _stop(self, deadline_s: float) -> None:
        await asyncio.gather(*(keeper.stop(deadline_s) for keeper in self._gangs.values()))
        self._gangs, self._config = {}, None
        self._publish()

    def _may_be_replaced(self) -> bool:
        """Whether no gang has ever served and one was given up: then no gateway relies on the
        config, and the mistake in it can be mended."""
        has_served = any(keeper.history.has_served for keeper in self._gangs.values())
        return not has_served and any(gang.is_given_up for gang in self._snapshot.gangs)

    def _configure(self, config: TandemConfig) -> None:
        self._config = config
        machines = RayMachines()
        self._gangs = {
            plan.name: GangKeeper(
                plan, config, machines, self._epochs, self._publish, weights=self._weights
            )
            for plan in plan_gangs(config)
        }
        self._publish()

    async def _adopt(self) -> None:
        """Go on with what lives of every gang of the latest config; end all other ranks."""
        ranks = await asyncio.to_thread(find_ranks)
        asked = await asyncio.gather(*(_told(rank, rank.who(0, 0, None)) for rank in ranks))
        told = {rank.name: rank for rank, state in zip(ranks, asked, strict=True) if state}
        states = [state for state in asked if state is not None]
        configs = {text: _read(text) for text in dict.fromkeys(s.config_json for s in states)}
        gangs = living([state for state in states if configs[state.config_json] is not None])
        kept = [state for gang in gangs.values() for state in gang]
        names = {state.spec.process for state in kept}
        for rank in [rank for rank in ranks if rank.name not in names]:
            log.warning("%s is of no gang that goes on: ended", rank.name)
            rank.kill()
        await asyncio.to_thread(remove_groups, [state.spec for state in kept])
        placed = {}
        for gang, (first, *_) in gangs.items():
            if first.placement:
                rank = told[first.spec.process]
                placed[gang] = await _told(rank, rank.placement())
        # From here on nothing fails: it is done once.
        incarnation = max(int(time.time()), *(1 + state.seen[0] for state in states), 1)
        self._epochs.seen = incarnation, max((state.seen[1] for state in states), default=0)
        if kept and (config := configs[kept[0].config_json]) is not None:
            self._configure(config)
        for name, keeper in self._gangs.items():
            found = gangs.get(name, [])
            keeper.placement = placed.get(name)  # unknown, its ranks differ: then it ends
            keeper.history = History(has_served=True)
            keeper.start([told[state.spec.process] for state in found], found)
        self._publish()
        self._background.start(again(POLL_S, self._make_way))

    async def _make_way(self) -> None:
        """Gangs on machines that Ray drains go elsewhere."""
        for name in (await in_thread(leaving) & self._gangs.keys()) - self._moving:
            log.warning("%s lies on a machine that drains: it goes elsewhere", name)
            self._moving.add(name)
            self._background.start(self._move(name, self._gangs[name]))

    async def _move(self, name: str, keeper: GangKeeper) -> None:
        try:
            await renew(keeper, self._changing, keeper.placement)
        finally:
            self._moving.discard(name)

    def _publish(self) -> None:
        gangs = tuple(keeper.gang for keeper in self._gangs.values())
        version = self._epochs.seen[0], self._snapshot.version[1] + 1
        config = "" if self._config is None else shared_digest(self._config)
        self._snapshot = Membership(version, gangs, config, self._proof_key)
        self._changed.set()
        self._changed = asyncio.Event()


def _read(config_json: str) -> TandemConfig | None:
    """None if it is one of another release."""
    try:
        return received(config_json)
    except ValueError as error:
        log.warning("a rank cannot be adopted: %s", error)
        return None


async def _told(rank: RayRank, answer: Awaitable[Answer]) -> Answer | None:
    """What a rank says of itself; None if it is dead or silent."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await answer
    except (TandemError, TimeoutError) as error:
        log.warning("%s: %s", rank.name, error)
        return None
