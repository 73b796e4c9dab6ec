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

from cluster.control.gang import Epochs, GangKeeper
from cluster.control.machines import RayMachines, RayRank, find_ranks, remove_groups
from cluster.control.next_life import History
from cluster.control.plan import plan_gangs, whole_gangs
from cluster.control.rebalance import rebalance_gang
from core.config import TandemConfig, differences
from core.errors import TandemError
from core.membership import READY, Membership
from core.schema import encode_failure, pack

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)
SILENCE_S = 10.0
"""A rank that says nothing for this long is not adopted."""


class Controller:
    """Owns the gangs of one cluster."""

    def __init__(self) -> None:
        self._epochs = Epochs()
        self._config: TandemConfig | None = None
        self._gangs: dict[str, GangKeeper] = {}
        self._snapshot = Membership((0, 0))
        self._changed = asyncio.Event()
        self._adopting = asyncio.Lock()
        self._changing = asyncio.Lock()
        # Nobody may ask for a long time after a restart, and gangs die meanwhile.
        ray.get_runtime_context().current_actor.begin.remote()

    async def begin(self) -> None:
        """Adopt what is there, once: every other call waits for it."""
        async with self._adopting:
            if self._epochs.seen[0] == 0:
                await self._adopt()

    async def attach(self, config_json: str) -> bytes:
        """The packed Membership; starts the gangs if nobody has, and again those that are down.

        A packed ValueError names each key that differs from the running cluster's.
        """
        await self.begin()
        try:
            async with self._changing:
                await self._attach(TandemConfig.model_validate_json(config_json))
                return pack(self._snapshot)
        except ValueError as error:
            return encode_failure(error)

    async def membership(self, incarnation: int, counter: int, wait_s: float) -> bytes:
        """The packed Membership, as soon as it is newer than that version or ``wait_s`` is over."""
        await self.begin()
        if self._snapshot.version <= (incarnation, counter):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        return pack(self._snapshot)

    async def report(self, gang: str, epoch: int, reason: str) -> None:
        """A gateway suspects a gang's life: look whether its ranks still answer."""
        await self.begin()
        if gang in self._gangs:
            self._gangs[gang].report(epoch, reason)

    async def rebalance(self, gang: str, drain_s: float) -> bytes:
        """Packed Rebalanced, or why not."""
        await self.begin()
        try:
            async with self._changing:
                if gang not in self._gangs:
                    raise ValueError(f"gang={gang!r}: there is none; known are {[*self._gangs]}")
                return pack(await rebalance_gang(self._gangs[gang], drain_s))
        except (ValueError, TandemError) as error:
            return encode_failure(error)

    async def stop(self, deadline_s: float) -> None:
        """End every rank within ``deadline_s`` seconds, and give back their room."""
        await self.begin()
        async with self._changing:
            await self._stop(deadline_s)

    async def _attach(self, config: TandemConfig) -> None:
        differing = [] if self._config is None else differences(self._config, config)
        if differing and not self._has_failed():
            raise ValueError(
                f"config: a cluster runs in this Ray, and {'; '.join(differing)}: use its values, "
                "or stop it with `tandem stop`"
            )
        if differing:
            await self._stop(config.control.stop_s)
        if self._config is None:
            self._configure(config)
        for keeper in self._gangs.values():
            keeper.start()

    async def _stop(self, deadline_s: float) -> None:
        await asyncio.gather(*(keeper.stop(deadline_s) for keeper in self._gangs.values()))
        self._gangs, self._config = {}, None
        self._publish()

    def _has_failed(self) -> bool:
        """Nothing serves, and who starts it gives up: another config may be tried."""
        gangs = self._snapshot.gangs
        return any(g.is_given_up for g in gangs) and all(g.state != READY for g in gangs)

    def _configure(self, config: TandemConfig) -> None:
        self._config = config
        machines = RayMachines()
        self._gangs = {
            plan.name: GangKeeper(plan, config, machines, self._epochs, self._publish)
            for plan in plan_gangs(config)
        }
        self._publish()

    async def _adopt(self) -> None:
        """Go on with every whole gang of the latest config; end all other ranks."""
        ranks = await asyncio.to_thread(find_ranks)
        asked = await asyncio.gather(*(_told(rank, rank.who(0, 0)) for rank in ranks))
        states = [state for state in asked if state is not None]
        seen = [state.seen for state in states]
        incarnation = max(int(time.time()), *(1 + seen_by[0] for seen_by in seen), 1)
        self._epochs.seen = incarnation, max((seen_by[1] for seen_by in seen), default=0)
        by_name = {rank.name: rank for rank in ranks}
        whole = whole_gangs(states)
        kept = [state for gang in whole.values() for state in gang]
        names = {state.spec.process for state in kept}
        for rank in [rank for rank in ranks if rank.name not in names]:
            log.warning("%s belongs to no whole gang: ended", rank.name)
            rank.kill()
        await asyncio.to_thread(remove_groups, [state.spec for state in kept])
        if kept:
            self._configure(TandemConfig.model_validate_json(kept[0].config_json))
        for gang, keeper in self._gangs.items():
            life = whole.get(gang, [])
            adopted = [by_name[state.spec.process] for state in life]
            if life and life[0].placement:  # unknown, its ranks differ: then it ends
                keeper.placement = await _told(adopted[0], adopted[0].placement())
            keeper.history = History(has_served=True)
            keeper.start(adopted, life)
        self._publish()

    def _publish(self) -> None:
        gangs = tuple(keeper.gang for keeper in self._gangs.values())
        version = self._epochs.seen[0], self._snapshot.version[1] + 1
        self._snapshot = Membership(version, gangs)
        self._changed.set()
        self._changed = asyncio.Event()


async def _told(rank: RayRank, answer: Awaitable[Answer]) -> Answer | None:
    """What a rank says of itself; None if it is dead or silent."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await answer
    except (TandemError, TimeoutError) as error:
        log.warning("%s: %s", rank.name, error)
        return None
