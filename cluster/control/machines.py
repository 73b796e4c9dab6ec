"""Ranks as Ray actors: detached, one placement group per gang and life, found again by name."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.util.scheduling_strategies as scheduling
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

from tandem.cluster.control.actors import ACTORS, NAMESPACE
from tandem.cluster.control.plan import Birth, GangPlan, Machine, home, hosts_of, no_room, room_of
from tandem.cluster.control.ray_private import draining_nodes, free_of_nodes
from tandem.cluster.control.verdict import LastWords, LifeOver
from tandem.core.config import TandemConfig
from tandem.core.errors import Overloaded, RankLost
from tandem.core.membership import ExpertRows, Meeting, RankSpec, RankState
from tandem.core.placement import Placement
from tandem.core.schema import pack, unpack
from tandem.core.tasks import in_thread
from tandem.runtime.black_box import read_box

CONTROLLER = "controller"
ROOM_TIMEOUT_S = 60.0
GROUPS = "tandem:"
WORDS_TIMEOUT_S = 10.0
LOG_BYTES = 64 << 10
log = logging.getLogger(__name__)
DETACHED = {"namespace": NAMESPACE, "lifetime": "detached", "max_concurrency": 10_000}


class RayRank:
    """A rank's actor as its keeper holds it. Calls raise RankLost when it is dead, TimeoutError
    when that cannot be told now."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    async def who(self, incarnation: int, epoch: int, weights: str | None) -> RankState:
        """See runtime/shell.py: RankShell."""
        return unpack(
            RankState, await self._told(self._actor.who.remote(incarnation, epoch, weights))
        )

    async def _told(self, answer: Any) -> Any:
        try:
            return await answer
        except ActorUnavailableError as error:
            raise TimeoutError(str(error)) from error
        except RayError as error:
            raise RankLost(f"{self.name}: {error}") from error

    async def host(self) -> Meeting:
        """Of rank 0: where the ranks of a new life meet."""
        return unpack(Meeting, await self._told(self._actor.host.remote()))

    async def join(self, spec: RankSpec, meeting: Meeting) -> None:
        """Begin a life; ``who`` tells when the rank is ready."""
        await self._told(self._actor.join.remote(pack(spec), pack(meeting)))

    async def leave(self) -> None:
        """End this life of it, not its process. RankLost also if it cannot."""
        await self._told(self._actor.leave.remote())

    async def expert_rows(self) -> ExpertRows:
        return unpack(ExpertRows, await self._told(self._actor.expert_rows.remote()))

    async def placement(self) -> Placement:
        return unpack(Placement, await self._told(self._actor.placement.remote()))

    async def stop(self) -> None:
        await self._actor.stop.remote()

    def kill(self) -> None:
        """Also ends a stopped process: its raylet does it after five seconds."""
        ray.kill(self._actor)


Alive = dict[int, RayRank]
"""A gang's ranks, by number."""


class RayMachines:
    """Room from Ray for every rank of a gang at once, on as few machines as may be."""

    async def begin(self, plan: GangPlan, birth: Birth, config: TandemConfig, ranks: Alive) -> None:
        """Add those that are missing to the ``ranks``; they load from now on. Raises Overloaded
        when there is no room for them, RankLost when that of the others is gone, and when Ray
        itself does not answer LifeOver, which the others outlive."""
        told = config.model_dump_json(), pack(birth.placement) if birth.placement else b""
        try:
            room = await in_thread(lambda: _room(plan, birth))
            hosts = await asyncio.to_thread(_hosts, room, config.kv_transfer.host)
            specs = plan.specs(birth.epoch, hosts, birth.room)
            ranks.update((r, _create(specs[r], plan.resources, room, *told)) for r in birth.missing)
        except RayError as error:
            lost = RankLost(f"{plan.name}: Ray does not begin it: {error}")
            raise LifeOver(lost, *(ranks.keys() & birth.missing)) from error

    async def last_words(self, state: RankState) -> LastWords:
        """Of a rank that has been killed, from its machine; empty where that cannot be had."""
        try:
            async with asyncio.timeout(WORDS_TIMEOUT_S):
                if Path(state.box_path).exists() or Path(state.log_path).exists():
                    data = await asyncio.to_thread(_last_words, state.log_path, state.box_path)
                    return unpack(LastWords, data)
                return await asyncio.to_thread(_last_words_there, state)
        except Exception as error:
            log.warning("%s left no last words: %r", state.spec.life, error)
            return LastWords()

    async def clear(self, gang: str) -> None:
        """Give back the room of every life of a gang; its ranks have been killed."""
        await asyncio.to_thread(remove_groups, (), gang)


def _room(plan: GangPlan, birth: Birth) -> Any:
    """The gang's placement group, taken now for the life that it is named by. Blocks."""
    name = _group_name(plan.name, birth.room)
    if birth.room != birth.epoch:
        try:
            return get_placement_group(name)
        except ValueError as error:
            raise RankLost(f"{plan.name}: its room is gone") from error
    remove_groups(gang=plan.name)  # of lives whose room could not be given back
    group = placement_group(
        [dict(plan.resources)] * plan.num_ranks,
        strategy="PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[home(plan, _machines())] * plan.num_ranks,
    )
    # Group.ready() would start a worker process of its own just to tell.
    if not group.wait(ROOM_TIMEOUT_S):
        raise Overloaded(no_room(plan, _machines()))
    return group


def _machines() -> list[Machine]:
    """Those of Ray that stay."""
    free, gone = free_of_nodes(), draining_nodes()
    return [
        Machine(one["Labels"], one["Resources"], free.get(one["NodeID"], {}))
        for one in ray.nodes()
        if one["Alive"] and one["NodeID"] not in gone
    ]


def _create(spec: RankSpec, resources: Mapping[str, float], group: Any, *told: Any) -> RayRank:
    """``told`` is what its process gets beside the spec."""
    actor: Any = ray.remote(ACTORS[spec.kind]).options(
        name=spec.process,
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(group, spec.rank),
        **DETACHED,
    )
    return RayRank(spec.process, actor.remote(pack(spec), *told))


def _last_words(log_path: str, box_path: str) -> bytes:
    """Packed LastWords, on the machine of the rank, whose box is of no further use."""
    text, in_step = "", read_box(box_path)
    Path(box_path).unlink(missing_ok=True)
    if Path(log_path).is_file():
        with open(log_path, "rb") as file:
            file.seek(max(0, Path(log_path).stat().st_size - LOG_BYTES))
            text = file.read().decode(errors="replace")
    return pack(LastWords(text, in_step))


def _last_words_there(state: RankState) -> LastWords:
    """By a task on the machine of the rank, while its placement group tells which one that was."""
    spec = state.spec
    placed = ray.util.placement_group_table(
        get_placement_group(_group_name(spec.gang, room_of(spec)))
    )["bundles_to_node_id"]
    there = scheduling.NodeAffinitySchedulingStrategy(placed[spec.rank], soft=False)
    task: Any = ray.remote(_last_words).options(num_cpus=0, scheduling_strategy=there)
    told = task.remote(state.log_path, state.box_path)
    return unpack(LastWords, ray.get(told, timeout=WORDS_TIMEOUT_S))


def _hosts(group: Any, host: str) -> list[str]:
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
    found = [placed.get(index, "") for index in range(group.bundle_count)]
    if lost := [index for index, machine in enumerate(found) if machine not in addresses]:
        # Ray moves what lay on a machine that it has lost; the other ranks keep theirs.
        raise LifeOver(RankLost(f"ranks {lost} have lost their machine and have no other yet"))
    return hosts_of(host, found, addresses)


def find_ranks() -> list[RayRank]:
    """Every rank that Ray knows of, of whatever life. Blocks."""
    found = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and named["name"] != CONTROLLER:
            with suppress(ValueError):  # it died meanwhile
                found.append(RayRank(named["name"], ray.get_actor(named["name"], NAMESPACE)))
    return found


def leaving() -> set[str]:
    """Gangs with room on a machine that Ray drains. Blocks."""
    if not (draining := draining_nodes()):
        return set()
    groups = ray.util.placement_group_table().values()
    found = [
        group["name"].removeprefix(GROUPS).rpartition(".")[0]
        for group in groups
        if group["state"] != "REMOVED"
        and not draining.isdisjoint(group["bundles_to_node_id"].values())
    ]
    return set(found)


def remove_groups(kept: Sequence[RankSpec] = (), gang: str = "") -> None:
    """Remove the placement groups of a gang, of all gangs if ``gang`` is "", except those of the
    ranks that are kept. Blocks."""
    prefix = f"{GROUPS}{gang}." if gang else GROUPS
    names = {_group_name(spec.gang, room_of(spec)) for spec in kept}
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(prefix) and group["name"] not in names:
            with suppress(ValueError):  # it is gone already
                remove_placement_group(get_placement_group(group["name"]))


def _group_name(gang: str, epoch: int) -> str:
    return f"{GROUPS}{gang}.{epoch}"
