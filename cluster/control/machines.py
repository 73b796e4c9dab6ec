"""Ranks as detached Ray actors, found again by name. Each gang has one placement group."""

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
from tandem.cluster.control.failure import CrashReport, EpochOver
from tandem.cluster.control.plan import (
    EpochLaunch,
    GangPlan,
    Machine,
    choose_label_selector,
    host_addresses,
    no_capacity_message,
    placement_group_epoch_of,
)
from tandem.cluster.control.ray_private import draining_nodes, free_resources_by_node
from tandem.core.config import TandemConfig
from tandem.core.errors import Overloaded, RankLost
from tandem.core.membership import ExpertRows, RankSpec, RankState, Rendezvous
from tandem.core.placement import Placement
from tandem.core.schema import pack, unpack
from tandem.core.tasks import run_in_thread
from tandem.runtime.crash_journal import read_crash_journal

CONTROLLER = "controller"
PLACEMENT_TIMEOUT_S = 60.0
GROUP_NAME_PREFIX = "tandem:"
CRASH_REPORT_TIMEOUT_S = 10.0
MAX_CRASH_LOG_BYTES = 64 << 10
log = logging.getLogger(__name__)
DETACHED_OPTIONS = {"namespace": NAMESPACE, "lifetime": "detached", "max_concurrency": 10_000}


class RayRank:
    """A supervisor's handle of a rank's actor.

    Calls raise RankLost if the actor is dead, and TimeoutError if Ray cannot reach it at present.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    async def get_state(self, incarnation: int, epoch: int, weights: str | None) -> RankState:
        """Return the rank's state; see RankActor in runtime/rank_actor.py."""
        return unpack(
            RankState,
            await self._await_reply(self._actor.get_state.remote(incarnation, epoch, weights)),
        )

    async def _await_reply(self, reply: Any) -> Any:
        try:
            return await reply
        except ActorUnavailableError as error:
            raise TimeoutError(str(error)) from error
        except RayError as error:
            raise RankLost(f"{self.name}: {error}") from error

    async def open_rendezvous(self) -> Rendezvous:
        """Let rank 0 open the rendezvous of a new epoch, at which its ranks meet."""
        return unpack(Rendezvous, await self._await_reply(self._actor.open_rendezvous.remote()))

    async def join(self, spec: RankSpec, rendezvous: Rendezvous) -> None:
        """Start to join an epoch. ``get_state`` reports when the rank is ready."""
        await self._await_reply(self._actor.join.remote(pack(spec), pack(rendezvous)))

    async def leave(self) -> None:
        """Leave the epoch; the process continues. Raises RankLost also if the rank cannot leave."""
        await self._await_reply(self._actor.leave.remote())

    async def expert_rows(self) -> ExpertRows:
        return unpack(ExpertRows, await self._await_reply(self._actor.expert_rows.remote()))

    async def placement(self) -> Placement:
        return unpack(Placement, await self._await_reply(self._actor.placement.remote()))

    async def stop(self) -> None:
        await self._actor.stop.remote()

    def kill(self) -> None:
        """Kill the process. Ray also kills a process stopped by SIGSTOP, after five seconds."""
        ray.kill(self._actor)


RanksByNumber = dict[int, RayRank]
"""A gang's ranks, by number."""


class RayMachines:
    """Starts the ranks of gangs through Ray.

    Ray places all ranks of a gang at once, preferably on one machine or a small number of them.
    """

    async def launch_ranks(
        self, plan: GangPlan, launch: EpochLaunch, config: TandemConfig, ranks: RanksByNumber
    ) -> None:
        """Start the missing ranks of a gang and add them to ``ranks``.

        Raises:
            Overloaded: Ray has no capacity for the gang.
            RankLost: The placement group of the other ranks no longer exists.
            EpochOver: Ray does not answer, or has no replacement yet for a lost machine. The other
                ranks are kept.
        """
        config_and_placement = (
            config.model_dump_json(),
            pack(launch.placement) if launch.placement else b"",
        )
        try:
            group = await run_in_thread(lambda: _get_placement_group(plan, launch))
            hosts = await asyncio.to_thread(_rank_hosts, group, config.kv_transfer.host)
            specs = plan.specs(launch.epoch, hosts, launch.placement_group_epoch)
            ranks.update(
                (r, _create_rank(specs[r], plan.resources, group, *config_and_placement))
                for r in launch.missing
            )
        except RayError as error:
            lost = RankLost(f"{plan.name}: Ray could not start its ranks: {error}")
            raise EpochOver(lost, *(ranks.keys() & launch.missing)) from error

    async def read_crash_report(self, state: RankState) -> CrashReport:
        """Read the crash report of a killed rank from its machine.

        Returns an empty report if that is impossible.
        """
        try:
            async with asyncio.timeout(CRASH_REPORT_TIMEOUT_S):
                if Path(state.crash_journal_path).exists() or Path(state.log_path).exists():
                    data = await asyncio.to_thread(
                        _read_crash_report, state.log_path, state.crash_journal_path
                    )
                    return unpack(CrashReport, data)
                return await asyncio.to_thread(_read_crash_report_remotely, state)
        except Exception as error:
            log.warning("%s: cannot read its crash report: %r", state.spec.epoch_name, error)
            return CrashReport()

    async def release_placement_group(self, gang: str) -> None:
        """Remove the gang's placement groups of all epochs.

        Call this only after its ranks have been killed.
        """
        await asyncio.to_thread(remove_placement_groups, (), gang)


def _get_placement_group(plan: GangPlan, launch: EpochLaunch) -> Any:
    """Return the placement group of the launch. Blocks.

    The group is created if the launch's epoch is the first one that uses it.
    """
    name = _placement_group_name(plan.name, launch.placement_group_epoch)
    if launch.placement_group_epoch != launch.epoch:
        try:
            return get_placement_group(name)
        except ValueError as error:
            raise RankLost(f"{plan.name}: its placement group no longer exists") from error
    remove_placement_groups(gang=plan.name)  # left over from epochs where the removal failed
    group = placement_group(
        [dict(plan.resources)] * plan.num_ranks,
        strategy="PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[choose_label_selector(plan, _list_machines())] * plan.num_ranks,
    )
    # Unlike wait(), group.ready() would start a worker process.
    if not group.wait(PLACEMENT_TIMEOUT_S):
        raise Overloaded(no_capacity_message(plan, _list_machines()))
    return group


def _list_machines() -> list[Machine]:
    """Return the machines of Ray that are alive and not draining."""
    free = free_resources_by_node()
    gone = draining_nodes()
    return [
        Machine(node["Labels"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in gone
    ]


def _create_rank(
    spec: RankSpec, resources: Mapping[str, float], group: Any, *extra_args: Any
) -> RayRank:
    """Create a rank's actor. ``extra_args`` follow the spec in its constructor."""
    actor: Any = ray.remote(ACTORS[spec.kind]).options(
        name=spec.process_name,
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(group, spec.rank),
        **DETACHED_OPTIONS,
    )
    return RayRank(spec.process_name, actor.remote(pack(spec), *extra_args))


def _read_crash_report(log_path: str, crash_journal_path: str) -> bytes:
    """Return a packed CrashReport from a rank's log and crash journal, and delete the journal.

    Runs on the rank's machine.
    """
    text = ""
    in_step = read_crash_journal(crash_journal_path)
    Path(crash_journal_path).unlink(missing_ok=True)
    if Path(log_path).is_file():
        with open(log_path, "rb") as file:
            file.seek(max(0, Path(log_path).stat().st_size - MAX_CRASH_LOG_BYTES))
            text = file.read().decode(errors="replace")
    return pack(CrashReport(text, in_step))


def _read_crash_report_remotely(state: RankState) -> CrashReport:
    """Read the crash report with a Ray task on the rank's machine.

    The placement group shows which machine that is.
    """
    spec = state.spec
    placed = ray.util.placement_group_table(
        get_placement_group(_placement_group_name(spec.gang, placement_group_epoch_of(spec)))
    )["bundles_to_node_id"]
    strategy = scheduling.NodeAffinitySchedulingStrategy(placed[spec.rank], soft=False)
    task: Any = ray.remote(_read_crash_report).options(num_cpus=0, scheduling_strategy=strategy)
    reply = task.remote(state.log_path, state.crash_journal_path)
    return unpack(CrashReport, ray.get(reply, timeout=CRASH_REPORT_TIMEOUT_S))


def _rank_hosts(group: Any, host: str) -> list[str]:
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]
    }
    found = [placed.get(index, "") for index in range(group.bundle_count)]
    if lost := [index for index, machine in enumerate(found) if machine not in addresses]:
        # Ray reschedules the bundles of a lost machine; the other ranks keep theirs.
        raise EpochOver(
            RankLost(f"the machine of ranks {lost} is lost, and Ray has not replaced it yet")
        )
    return host_addresses(host, found, addresses)


def find_ranks() -> list[RayRank]:
    """Return every rank that Ray knows, of any epoch. Blocks."""
    found = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and named["name"] != CONTROLLER:
            with suppress(ValueError):  # the actor has died since
                found.append(RayRank(named["name"], ray.get_actor(named["name"], NAMESPACE)))
    return found


def find_draining_gangs() -> set[str]:
    """Return the gangs with bundles on machines that Ray drains. Blocks."""
    if not (draining := draining_nodes()):
        return set()
    groups = ray.util.placement_group_table().values()
    found = [
        group["name"].removeprefix(GROUP_NAME_PREFIX).rpartition(".")[0]
        for group in groups
        if group["state"] != "REMOVED"
        and not draining.isdisjoint(group["bundles_to_node_id"].values())
    ]
    return set(found)


def remove_placement_groups(kept_specs: Sequence[RankSpec] = (), gang: str = "") -> None:
    """Remove the placement groups of ``gang`` ("": of all gangs), except those of ``kept_specs``.

    Blocks.
    """
    prefix = f"{GROUP_NAME_PREFIX}{gang}." if gang else GROUP_NAME_PREFIX
    names = {
        _placement_group_name(spec.gang, placement_group_epoch_of(spec)) for spec in kept_specs
    }
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(prefix) and group["name"] not in names:
            with suppress(ValueError):  # already removed
                remove_placement_group(get_placement_group(group["name"]))


def _placement_group_name(gang: str, epoch: int) -> str:
    return f"{GROUP_NAME_PREFIX}{gang}.{epoch}"
