"""Service levels that clients may expect of gateways, checked every second."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.cluster.control.machines import CONTROLLER
from tandem.cluster.gateway.handles import RankHandle
from tandem.core.membership import READY, Membership
from tandem.core.placement import Placement
from tests.sim.world import Gateway, World

if TYPE_CHECKING:
    from tandem.cluster.control.gang_supervisor import GangSupervisor
    from tests.sim.clients import Client

ANSWERED_S = 24.0
"""Maximum time in which a healthy cluster answers the request of a well-behaved client."""
STARTED_S = 16.0
"""Maximum start time of a gateway that reaches a pair of ranks, even if another pair is cut off."""
STILL_S, TURN_S = 1.5, 0.5
"""Maximum time for which a gateway's loop may be blocked, and the period of its probe."""


@dataclass
class Service:
    """Service checks of one world."""

    world: World
    quiet_at: float = 0.0
    """Time when the last fault ends."""
    parted_at: float = 0.0
    """Time when the last fault ends, not counting cuts between two ranks."""
    moved: "dict[GangSupervisor, Placement]" = field(default_factory=dict)
    """Placement of experts of gangs whose move has succeeded."""
    longest_s: float = 0.0
    """Longest time that a well-behaved client waited for its answer while the cluster was
    healthy."""
    _turns: dict[Gateway, float] = field(default_factory=dict)
    _startable_since: dict[Gateway, float] = field(default_factory=dict)

    def disturbed(self, until: float, is_parted: bool = False) -> None:
        """Record a fault that lasts until ``until``."""
        self.quiet_at = max(self.quiet_at, until)
        if not is_parted:
            self.parted_at = max(self.parted_at, until)

    def look(self, clients: "list[Client]") -> None:
        """Record whether the cluster is healthy, and report everything that takes too long."""
        now, world = self.world.loop.time(), self.world
        if now < self.quiet_at or self._is_ill():
            world.well_since = now
        for client in [one for one in clients if not one.has_left]:
            since = max(client.began_at, world.well_since)
            waited_s = min(now, client.done_at) - since
            self.longest_s = max(self.longest_s, waited_s)
            if not client.is_done and waited_s > ANSWERED_S:
                world.wrong(f"client {client.number} waits since {client.began_at:.3f}")
        for gateway in world.gateways:
            self._look_at(gateway, now)
        for supervisor, placement in self.moved.items():
            if supervisor.placement != placement and supervisor.is_supervised:
                world.wrong(f"{supervisor.plan.name}: its experts were moved, and are moved back")

    def _look_at(self, gateway: Gateway, now: float) -> None:
        process = gateway.process
        if not process.is_alive or process.is_stopped:
            self._startable_since[gateway] = now
            if gateway in self._turns:
                self._turns[gateway] = now
            return
        if gateway not in self._turns:
            self._turn(gateway)
        elif now - self._turns[gateway] > STILL_S:
            self.world.wrong(f"{gateway.name}: its loop stands still")
        since = self._startable_since.setdefault(gateway, now)
        if gateway.is_serving or now < self.parted_at or not self._can_start(gateway):
            self._startable_since[gateway] = now
        elif now - since > STARTED_S:
            self.world.wrong(f"{gateway.name} does not start, although others serve")

    def _turn(self, gateway: Gateway) -> None:
        self._turns[gateway] = self.world.loop.time()
        gateway.process.call(self._turn, gateway, after_s=TURN_S)

    def _can_start(self, gateway: Gateway) -> bool:
        """Whether gangs are ready, and another gateway uses a pair of their ranks that reach each
        other."""
        others = [one for one in self.world.gateways if one is not gateway and one.is_serving]
        used = [one.gateway.fleet.usable_pairs() for one in others if one.gateway is not None]
        return self._are_ready() and any(self._reach(*pair) for pairs in used for pair in pairs)

    def _reach(self, *ranks: RankHandle) -> bool:
        """Whether the two ranks can reach each other."""
        actors = [self.world.ray.actors[rank.info.spec.process_name] for rank in ranks]
        one, other = (actor.process for actor in actors)
        if one is None or other is None:
            return False
        return not (self.world.net.is_silent(one, other) or self.world.net.is_silent(other, one))

    def _is_ill(self) -> bool:
        """Whether the cluster lacks something for which clients may have to wait."""
        ranks = [one for one in self.world.ray.actors.values() if one.process is not None]
        if any(one.process.is_stopped and one.process.is_alive for one in ranks if one.process):
            return True
        return not (self._are_ready() and all(map(self._is_whole, self.world.gateways)))

    def _are_ready(self) -> bool:
        gangs = self.snapshot().gangs
        return bool(gangs) and all(gang.state == READY for gang in gangs)

    def _is_whole(self, gateway: Gateway) -> bool:
        if not gateway.is_serving or gateway.process.is_stopped or gateway.gateway is None:
            return False
        fleet = gateway.gateway.fleet
        return bool(fleet.usable_pairs()) and len(fleet.usable_pairs()) == len(fleet._warm_ups)

    def snapshot(self) -> Membership:
        """Return the controller's latest membership; an empty one without a controller."""
        actor = self.world.ray.actors.get(CONTROLLER)
        if actor is None or actor.instance is None:
            return Membership((0, 0))
        found: Membership = actor.instance._snapshot
        return found

    def held_weights(self) -> str:
        """Return the digest of the weights that the cluster's ranks hold; "" if there is none."""
        actor = self.world.ray.actors.get(CONTROLLER)
        return "" if actor is None or actor.instance is None else actor.instance._weights.digest
