"""Invariants of the cluster. They are checked while processes run no code and only wait."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.control.machines import CONTROLLER
from tandem.cluster.gateway.handles import AttemptRoute
from tandem.core.identity import Identity
from tandem.core.info import DECODE, PREFILL
from tandem.core.membership import READY
from tandem.runtime.rank_actor import RankActor
from tests.sim.world import Gateway, World

ANSWER_S, STILL_S = 60.0, 5.0
SLACK_S, LOOSE_S = 8.0, 2.0
"""Grace periods in seconds.

``SLACK_S`` is added to a lease, within which state unknown to all gateways must be released. It
covers sweeps, heartbeats, slow copies, and the leaving of a failed engine. ``LOOSE_S`` bounds the
time until a pull that lost its pages ends.
"""


@dataclass
class Checks:
    """Checks of one world.

    Attributes:
        _orphans: Sequences held on a rank and known to no gateway, with the time of discovery.
        _loose: Sequences that arrive on a rank which does not hold them, with the time of
            discovery.
    """

    world: World
    _orphans: dict[tuple[str, Identity], float] = field(default_factory=dict)
    _loose: dict[tuple[str, Identity], float] = field(default_factory=dict)

    def look(self) -> None:
        """Check that no sequence is on two decode ranks or unknown to all gateways, and check
        ranks. Runs every second and at every fault."""
        now, world = self.world.loop.time(), self.world
        held_by: dict[Identity, str] = {}
        orphans, watches, loose = {}, {}, {}
        known = self._known()
        for name, rank in self.ranks():
            watches[name] = rank.loop.stall_detector
            for identity in self._held(rank):
                if rank.spec.kind == DECODE:
                    if identity in held_by:
                        world.wrong(f"{identity} is on {held_by[identity]} and {name}")
                    held_by[identity] = name
                if identity not in known and rank.loop.is_running:
                    orphans[name, identity] = self._orphans.get((name, identity), now)
            if rank.spec.kind == DECODE:
                for identity in rank._arrivals.keys() - {*self._held(rank)}:
                    loose[name, identity] = self._loose.get((name, identity), now)
            if rank.loop.stall_detector._turn_started_at is None:
                self._integrity(name, rank)
        self._orphans, self._loose = orphans, loose
        for (name, identity), since in loose.items():
            if now - since > LOOSE_S:
                world.wrong(f"{name} pulls {identity} since {since:.3f} to pages that are free")
        for (name, identity), since in orphans.items():
            most_s, watch = world.config.kv_transfer.lease_s, watches[name]
            # Only the engine releases sequences, and it may have waited for a stopped rank since
            # then.
            if watch._turn_started_at is not None and watch._turn_started_at <= since + most_s:
                most_s = max(most_s, watch._turn_started_at - since + watch.stall_threshold_s)
            if now - since > most_s + SLACK_S + world.wires.most_extra_s:
                world.wrong(f"{name} holds {identity} for nobody since {since:.3f}")

    def is_whole(self) -> str:
        """Return the first thing that an idle cluster lacks or still holds, or ""."""
        controller = self.world.ray.actors.get(CONTROLLER)
        if controller is None or controller.instance is None:
            return "there is no controller"
        gangs = controller.instance._snapshot.gangs
        if not gangs or any(gang.state != READY for gang in gangs):
            return f"gangs: {[(gang.name, gang.state, gang.cause) for gang in gangs]}"
        lives = {info.spec.epoch_name for gang in gangs for info in gang.members}
        for one in self.world.gateways:
            if not one.process.is_alive or one.gateway is None:
                return f"{one.name} does not serve"
            fleet = one.gateway.fleet
            if fleet.ranks.keys() != lives:
                return f"{one.name} knows {[*fleet.ranks]}, not {lives}"
            if not fleet.usable_pairs() or len(fleet.usable_pairs()) < len(fleet._warm_ups):
                return (
                    f"{one.name} uses {len(fleet.usable_pairs())} of {len(fleet._warm_ups)} pairs"
                )
            if left := self._left_at(one):
                return f"{one.name} has {left}"
        members = {info.spec.process_name for gang in gangs for info in gang.members}
        alive = {name for name, _ in self.ranks()}
        if members != alive:
            return f"ranks {members} and {alive}"
        for name, rank in self.ranks():
            if held := self._held(rank):
                return f"{name} holds {held}"
            pool = rank.pool
            if pool.num_available != pool.num_pages - 1:
                return f"{name} has {pool.num_available} of {pool.num_pages - 1} pages"
            side = (
                rank.source._endpoint if rank.spec.kind == PREFILL else rank.kv_receiver._endpoint
            )
            if num := side.staging.num_taken:
                return f"{name} has {num} staging buffers taken"
            if busy := [link.owner for link in self._links(rank) if link.num_transferring]:
                return f"{name} has chunks of {busy} on their way"
        return ""

    def _left_at(self, one: Gateway) -> str:
        """Return what a gateway still holds of answers that have ended."""
        assert one.gateway is not None and one.admission is not None
        if num := len(one.admission._streams) or sum(map(len, one.gateway.open_answers)):
            return f"{num} open streams"
        if num := one.admission._threads.num_chars:
            return f"{num} characters to be tokenised"
        for rank in one.gateway.fleet.ranks.values():
            if rank.inboxes.queues or rank.inboxes.granted:
                return f"inboxes of {[*rank.inboxes.queues]} at {rank.epoch_name}"
            if rank.load.num_tokens:
                return f"{rank.load.num_tokens} tokens that {rank.epoch_name} is to compute"
        return ""

    async def all_pairs_work(self) -> None:
        """Send a request over each pair of each gateway, once the last fault's effects are over.

        A request that meets a half-open channel may fail; the next one gets a new channel.
        """
        await asyncio.sleep(STILL_S)  # time: virtual
        for one in self.world.gateways:
            assert one.gateway is not None
            for pair in one.gateway.fleet.usable_pairs():
                failure = await self._together(one, pair) and await self._together(one, pair)
                if failure:
                    names = " and ".join(rank.epoch_name for rank in pair)
                    self.world.wrong(f"{names} do not work together: {failure!r}")

    async def _together(self, one: Gateway, pair: Any) -> Exception | None:
        """Return the error of a request over this pair; None if there is none."""
        assert one.gateway is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                await one.gateway._send_warm_up(AttemptRoute(*pair, Identity(f"{one.name}-last")))
        except Exception as error:
            return error
        return None

    def ranks(self) -> Iterator[tuple[str, Any]]:
        """Yield the ranks that are alive and not stopped."""
        for actor in self.world.ray.actors.values():
            process, shell = actor.process, actor.instance
            if process is None or not process.is_alive or process.is_stopped:
                continue
            if isinstance(shell, RankActor) and shell._rank is not None:
                yield actor.name, shell._rank

    def _held(self, rank: Any) -> list[Identity]:
        scheduler = rank.engine.scheduler
        held = [*scheduler.sequences]
        if rank.spec.kind == PREFILL:
            return list(dict.fromkeys([*held, *rank.source._book.open_identities()]))
        return list(dict.fromkeys([*held, *scheduler.queue.resumed, *scheduler.queue.new]))

    def _links(self, rank: Any) -> list[Any]:
        return [] if rank.spec.kind == PREFILL else [*rank.kv_receiver._links.values()]

    def _known(self) -> set[Identity]:
        """Return the sequences known to live gateways, including stopped gateways."""
        known: set[Identity] = set()
        for one in self.world.gateways:
            if one.process.is_alive and one.gateway is not None:
                for handle in one.gateway.fleet.ranks.values():
                    known |= handle.inboxes.queues.keys()
        return known

    def _integrity(self, name: str, rank: Any) -> None:
        try:
            rank.pool.check_integrity()
            rank.engine.scheduler.check_integrity()
            if rank.spec.kind == DECODE:
                rank.sessions.check_integrity()
        except AssertionError as error:
            self.world.wrong(f"{name}: {error}")
