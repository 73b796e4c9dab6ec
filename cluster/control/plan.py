"""Which gangs a config asks for, where their ranks listen, which are whole: pure decisions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.config import AUTO, TandemConfig
from tandem.core.info import DECODE, PREFILL
from tandem.core.membership import RankSpec, RankState
from tandem.core.placement import Placement

GROUP, REPLICA = "ray.io/node-group", "tandem/replica"
"""Labels of machines in Ray: KubeRay's worker group, and there its replica of several hosts."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Of Ray; what it has of each resource, and what of it is free."""

    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GangPlan:
    """One gang; ``resources`` is what each of its ranks takes of a machine, which is of the
    ``group`` if it has one."""

    name: str
    kind: str
    num_ranks: int
    resources: Mapping[str, float]
    group: str | None = None

    def of_group(self, machines: Sequence[Machine]) -> list[Machine]:
        return [m for m in machines if self.group in (None, m.labels.get(GROUP))]

    def specs(self, epoch: int, hosts: Sequence[str], room: int = 0) -> list[RankSpec]:
        """Its ranks in a new life; ``hosts`` has the address of each, ``room`` is RankSpec's."""
        assert len(hosts) == self.num_ranks, f"{self.num_ranks} ranks on {hosts}"
        return [
            RankSpec(self.name, self.kind, epoch, rank, self.num_ranks, host, room=room)
            for rank, host in enumerate(hosts)
        ]


@dataclass(frozen=True, slots=True)
class Birth:
    """Processes to begin for the life ``epoch``: of the ranks ``missing``, in the room that was
    taken for the life ``room``, which is taken now if it is the same. ``placement`` is where their
    experts lie, None in plain order."""

    epoch: int
    room: int
    missing: Sequence[int]
    placement: Placement | None = None


def plan_gangs(config: TandemConfig) -> list[GangPlan]:
    """Prefill nodes, then decode nodes; colocated nodes follow the decode section."""
    gangs = []
    for kind in config.kinds:
        section = config.of_kind(kind)
        gpus = {"GPU": 1.0} if section.device == "cuda" else {}
        resources = {"CPU": section.num_threads, **gpus}
        for index in range(section.replicas):
            gangs.append(
                GangPlan(f"{kind}-{index}", kind, section.dp_size, resources, section.node_group)
            )
    return gangs


def home(plan: GangPlan, machines: Sequence[Machine]) -> dict[str, str]:
    """The labels of all machines that a gang may lie on: those of its group and, where that comes
    in replicas, of one with room for all of it, or that has to get some. Gangs that look at once
    look in different ones."""
    room = Counter[str]()
    for machine in plan.of_group(machines):
        of_each = (machine.free.get(name, 0) // num for name, num in plan.resources.items())
        room[machine.labels.get(REPLICA, "")] += int(min(of_each))
    labels = {} if plan.group is None else {GROUP: plan.group}
    if not (names := sorted(name for name in room if name)):
        return labels
    fits = [name for name in names if room[name] >= plan.num_ranks] or names
    return labels | {REPLICA: fits[int(plan.name.rpartition("-")[2]) % len(fits)]}


def no_room(plan: GangPlan, machines: Sequence[Machine]) -> str:
    """What is missing for a gang in a Ray of these machines."""
    section = PREFILL if plan.kind == PREFILL else DECODE
    if not (those := plan.of_group(machines)):
        there = sorted({m.labels[GROUP] for m in machines if GROUP in m.labels}) or "none"
        return (
            f"{plan.name}: no room: no machine of this Ray is of {section}.group={plan.group!r}; "
            f"of groups there are {there} (Ray's label {GROUP}, on Kubernetes the worker group)"
        )
    where = "this Ray" if plan.group is None else f"group {plan.group!r}"
    wants = [
        f"{num:g} {name} for each of {plan.num_ranks} ranks, of "
        f"{sum(m.total.get(name, 0) for m in those):g} in {where} "
        f"{sum(m.free.get(name, 0) for m in those):g} are free"
        for name, num in plan.resources.items()
    ]
    return (
        f"{plan.name}: no room: it takes {'; '.join(wants)}; add machines, or ask for less with "
        f"{section}.dp_size, {section}.replicas or {section}.num_threads"
    )


def hosts_of(host: str, machines: Sequence[str], addresses: Mapping[str, str]) -> list[str]:
    """The address that each rank listens on, by the machine that it is placed on: that by which Ray
    knows the machine, the loopback interface's in a Ray of one's own, unless ``host``
    (``kv_transfer.host``) is another. Machines that join later reach it there."""
    return [addresses[machine] if host == AUTO else host for machine in machines]


def living(states: Sequence[RankState]) -> dict[str, list[RankState]]:
    """By name, what of each gang goes on: those of the config of the latest epoch that are well,
    in the room that was taken last, of each rank the latest process; in order."""
    latest = max(states, key=lambda state: state.spec.epoch, default=None)
    config_json = None if latest is None else latest.config_json
    well = [s for s in states if s.failure is None and s.config_json == config_json]
    rooms: dict[str, int] = {}
    for state in well:
        rooms[state.spec.gang] = max(room_of(state.spec), rooms.get(state.spec.gang, 0))
    ranks: dict[str, dict[int, RankState]] = {}
    for state in sorted(well, key=lambda state: state.spec.born or state.spec.epoch):
        if room_of(state.spec) == rooms[state.spec.gang]:
            ranks.setdefault(state.spec.gang, {})[state.spec.rank] = state
    return {gang: [found[rank] for rank in sorted(found)] for gang, found in ranks.items()}


def room_of(spec: RankSpec) -> int:
    """The life for which its room was taken."""
    return spec.room or spec.epoch


def is_whole(states: Sequence[RankState]) -> bool:
    """Whether these are all ranks of one life of a gang."""
    epochs = {state.spec.epoch for state in states}
    return len(epochs) == 1 and len(states) == states[0].spec.num_ranks
