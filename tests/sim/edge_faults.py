"""Faults at the edges of a cluster: unreachable pairs, operators' changes, hostile clients."""

import asyncio
import random
from functools import partial

from ray.exceptions import RayError

from tandem.cluster.control.drain import drain_and_restart
from tandem.cluster.control.gang_supervisor import GangSupervisor
from tandem.cluster.control.members import RayMembers, stop_cluster
from tandem.core.config_shared import shared_digest
from tandem.core.errors import TandemError
from tandem.core.membership import READY
from tandem.core.placement import Placement
from tests.sim.actors import Actor
from tests.sim.fault import LASTING, Fault
from tests.sim.faults import Faults
from tests.sim.hostile import HostileClients
from tests.sim.loop import Process
from tests.sim.model import NO_MEMORY, OTHER_WEIGHTS, WEIGHTS
from tests.sim.service import Service
from tests.sim.world import World

PARTED = 3.0
"""Duration of a cut between two ranks, divided by that of other faults."""
LIFE_S = 0.05, 0.5
"""Lifetime range of a rank in a crash loop."""
NUM_EXPERTS = 4


class EdgeFaults(Faults):
    """All faults of ``Faults``, and those of seeds from EDGES on."""

    def __init__(
        self, world: World, draw: random.Random, service: Service, hostile: HostileClients
    ) -> None:
        super().__init__(world, draw)
        self._service, self._hostile = service, hostile
        self._crashes_until, self._is_over = 0.0, False
        world.on_life = self._lives
        world.ray.odd_error = self._odd
        self._odd_gateways: list[Process] = []

    def apply(self, fault: Fault) -> None:
        """Apply the fault, and record how long the cluster may be unhealthy because of it."""
        super().apply(fault)
        if fault.kind in LASTING:
            is_parted = fault.kind == "part pair"
            lasts_s = fault.for_s * (PARTED if is_parted else 1.0)
            self._service.disturbed(self.world.loop.time() + lasts_s, is_parted)

    def end(self) -> None:
        """End all faults. An operator restores the weights that ranks hold."""
        super().end()
        self._crashes_until, self._is_over = 0.0, True
        self._odd_gateways.clear()
        self.world.loads.arrivals.clear()
        self._hostile.end()
        held = self._service.held_weights()
        self.world.loads.weights = held or self.world.loads.weights

    def watch(self) -> None:
        """Restart gateways whose model or config differs from the cluster's, as their logs
        advise."""
        snapshot = self._service.snapshot()
        if not snapshot.ready():
            return
        digests = {info.model.digest for info in snapshot.ready()}
        for one in self.world.gateways:
            if one.gateway is None or not one.is_serving or one.process.is_stopped:
                continue
            is_other = snapshot.config != shared_digest(one.gateway.config)
            if is_other or one.gateway.model.digest not in digests:
                self.world.told("operator restarts", one.name)
                self._end_gateway(one)

    # Faults of ranks and gateways

    def _fail_arrival(self, fault: Fault) -> str:
        decodes = self._ranks_of("decode")
        if not decodes:
            return ""
        name = decodes[fault.number % len(decodes)].name
        is_bug = fault.number // 7 % 2 == 0
        error = KeyError("a fault of the rank's own") if is_bug else RuntimeError(NO_MEMORY)
        self.world.loads.arrivals[name] = error
        return f"{name}: {error!r}"

    def _odd_error(self, fault: Fault) -> str:
        """Make the next membership call of a gateway raise an unexpected error."""
        gateways = [one for one in self.world.gateways if one.is_serving]
        if not gateways:
            return ""
        self._odd_gateways.append(gateways[fault.number % len(gateways)].process)
        return self._odd_gateways[-1].name

    def _odd(self, caller: Process | None, method: str) -> Exception | None:
        if method != "membership" or caller not in self._odd_gateways:
            return None
        self._odd_gateways.remove(caller)
        return RuntimeError("cannot schedule new futures after shutdown")

    def _part_pair(self, fault: Fault) -> str:
        """Cut a decode rank off from a prefill rank, and restart a gateway during that time."""
        decodes, prefills = self._ranks_of("decode"), self._ranks_of("prefill")
        if not (decodes and prefills):
            return ""
        names = (
            decodes[fault.number % len(decodes)].name,
            prefills[fault.number // 7 % len(prefills)].name,
        )
        for way in (names, names[::-1]):
            self._cuts[way] = self.world.loop.time() + PARTED * fault.for_s
        self._later_passes(PARTED * fault.for_s + 0.001, self.world.net.heal)
        self._end_gateway(self.world.gateways[fault.number // 49 % len(self.world.gateways)])
        return " and ".join(names)

    def _ranks_of(self, kind: str) -> list[Actor]:
        return [rank for rank in self._actors() if rank.name.startswith(kind)]

    def _crash_loop(self, fault: Fault) -> str:
        """Kill every rank soon after it starts, for ``fault.for_s`` seconds."""
        self._crashes_until = self.world.loop.time() + fault.for_s
        for rank in self._actors():
            self._die_soon(rank)
        return f"{fault.for_s} s"

    def _lives(self, life: Process) -> None:
        if self.world.loop.time() < self._crashes_until:
            self._die_soon(self.world.ray.actor_of[life])

    def _die_soon(self, rank: Actor) -> None:
        assert rank.process is not None
        self._later_passes(self._draw.uniform(*LIFE_S), rank.process.kill)

    # Actions of an operator

    def _move_link(self, fault: Fault) -> str:
        self.world.loads.weights = OTHER_WEIGHTS
        self._later_passes(fault.for_s, self._move_link_back)
        return f"for {fault.for_s} s"

    def _move_link_back(self) -> None:
        if not self._is_over:
            self.world.loads.weights = WEIGHTS

    def _rebalance(self, fault: Fault) -> str:
        """Rebalance like ``tandem rebalance``, with token counts that no simulated rank has."""
        for one in self._actors(is_rank=False):
            gangs = one.instance._gangs if one.instance is not None else {}
            ready = [supervisor for supervisor in gangs.values() if supervisor.gang.state == READY]
            if ready and one.process is not None and not one.process.is_stopped:
                supervisor = ready[fault.number % len(ready)]
                one.process.start(
                    self._placed_anew(supervisor, one.instance._change_lock, fault.number)
                )
                return str(supervisor.gang.name)
        return ""

    async def _placed_anew(
        self, supervisor: GangSupervisor, change_lock: asyncio.Lock, number: int
    ) -> None:
        num_ranks = supervisor.plan.num_ranks
        experts = random.Random(number).sample(range(NUM_EXPERTS), NUM_EXPERTS)
        placement = Placement(num_ranks, (tuple(experts),))
        try:
            await drain_and_restart(supervisor, change_lock, placement)
        except TandemError as error:
            self.world.told("not moved", supervisor.plan.name, error)
        else:
            self._service.moved[supervisor] = placement

    def _other_config(self, fault: Fault) -> str:
        process = Process(self.world.loop, "operator", "m0")
        process.start(self._attach_other())
        return "a second serve"

    async def _attach_other(self) -> None:
        """Attach with another config. It is refused unless nothing is left of the cluster."""
        world = self.world
        try:
            await RayMembers.attach(other := world.other_config())
        except (TandemError, RayError, ValueError) as error:
            return world.told("refused", type(error).__name__)
        self._took_over(other)

    def _roll_out(self, fault: Fault) -> str:
        process = Process(self.world.loop, "operator", "m0")
        process.start(self._serve_other())
        return "another checkpoint"

    async def _serve_other(self) -> None:
        """Run ``tandem stop``, then ``tandem serve`` with another config."""
        world = self.world
        other = world.other_config()
        while world.config is not other:
            try:
                await stop_cluster(world.config.control.stop_timeout_s)
                await RayMembers.attach(other)
                self._took_over(other)
            except (TandemError, RayError, ValueError) as error:
                world.told("not rolled out", type(error).__name__)
                await asyncio.sleep(1.0)  # time: virtual

    def _took_over(self, config: object) -> None:
        self.world.config = config  # type: ignore[assignment]
        self.world.told("taken over")
        for gateway in self.world.gateways:
            self._later_passes(0.0, partial(self._end_gateway, gateway))

    # Hostile clients

    def _trickle(self, fault: Fault) -> str:
        self._hostile.trickle(fault.for_s)
        return f"{fault.for_s} s"

    def _half_read(self, fault: Fault) -> str:
        self._hostile.half_read(fault.for_s)
        return f"{fault.for_s} s"

    def _claims(self, fault: Fault) -> str:
        self._hostile.claims(fault.for_s)
        return f"{fault.for_s} s"

    def _long_texts(self, fault: Fault) -> str:
        self._hostile.long_texts(fault.for_s)
        return f"{fault.for_s} s"
