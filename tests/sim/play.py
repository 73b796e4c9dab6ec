"""The course of one seed: machines, gateways, clients and faults, until all is at rest."""

import asyncio
import random

from tests.sim.applications import Application
from tests.sim.checks import Checks
from tests.sim.clients import Client, Clients
from tests.sim.edge_faults import EdgeFaults
from tests.sim.fault import Fault
from tests.sim.faults import Faults
from tests.sim.hostile import HostileClients
from tests.sim.mix import SERVE_S, UP_S, arrivals_of
from tests.sim.readers import Reader
from tests.sim.requests import draw_order
from tests.sim.service import Service
from tests.sim.world import World, tokenizer

SETTLE_S = 240.0
SLOW = 0.2
"""Share of applications that once stop reading for a while."""
STALL_S = 2.0, 8.0


class Play:
    """Plays one seed in a world. It must be made outside of the world's patches."""

    def __init__(self, world: World) -> None:
        self.world, self.checks, self.service = world, Checks(world), Service(world)
        self.clients = Clients(world, random.Random())
        chances = random.Random(f"chances {world.seed}")
        self.faults = Faults(world, chances)
        if world.mix.is_edge:
            hostile = HostileClients(world, self.clients, random.Random(f"hostile {world.seed}"))
            self.faults = EdgeFaults(world, chances, self.service, hostile)

    async def live(self, faults: list[Fault]) -> None:
        """Run everything, and report violations to the world."""
        world, draw = self.world, random.Random(self.world.draw.random())
        self.clients.draw = draw
        for num_cpus in world.mix.machines:
            world.add_machine(num_cpus)
        for name in world.mix.gateways:
            world.begin_gateway(name)
        for at in arrivals_of(world.seed, world.draw):
            world.loop.call_later(at, self.clients.begin, self._client(draw))
        for fault in faults:
            world.loop.call_later(fault.at, self._apply, fault)
        for _ in range(int(UP_S + SERVE_S)):
            self._look()
            await asyncio.sleep(1.0)  # time: virtual
        self.faults.end()
        await self._settle()

    async def _settle(self) -> None:
        missing = "nothing was looked at"
        for _ in range(int(SETTLE_S)):
            self._look()
            clients = self.clients.all
            waiting = [f"client {c.number}: {c.last_failure}" for c in clients if not c.is_done]
            missing = waiting[0] if waiting else self.checks.is_whole()
            if not missing:
                return await self.checks.all_pairs_work()
            await asyncio.sleep(1.0)  # time: virtual
        self.world.wrong(f"not whole after {SETTLE_S:.0f} s: {missing}")

    def _client(self, draw: random.Random) -> Client:
        mix = self.world.mix
        if not mix.is_edge:
            return self.clients.make(may_leave=mix.comes_in_rushes)
        config = self.world.config
        order = draw_order(
            draw,
            config.model.max_model_len or 0,
            tokenizer(),
            has_drafts=config.speculation.drafter != "none",
            max_answers=2 if mix.is_hostile else 3,
        )
        made = Application(len(self.clients.all), order, self.world, draw)
        if draw.random() < SLOW:
            made.reader = Reader(stalls_after=draw.randint(0, 300), stalls_s=draw.uniform(*STALL_S))
        self.clients.add(made, may_leave=True)
        return made

    def _apply(self, fault: Fault) -> None:
        self.faults.apply(fault)
        self.checks.look()

    def _look(self) -> None:
        self.checks.look()
        if isinstance(self.faults, EdgeFaults):
            self.service.look(self.clients.all)
            self.faults.watch()
