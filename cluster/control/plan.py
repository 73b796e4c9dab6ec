"""Gangs of a configuration, addresses of their ranks, and adoption: pure decisions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.config import AUTO, TandemConfig
from tandem.core.info import DECODE, PREFILL
from tandem.core.membership import RankSpec, RankState
from tandem.core.placement import Placement

GROUP_LABEL = "ray.io/node-group"
REPLICA_LABEL = "tandem/replica"
"""Ray labels of machines: KubeRay's worker group, and its multi-host replica in that group."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of Ray: its labels, and the total and free amount of each resource."""

    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GangPlan:
    """Plan of one gang.

    Attributes:
        resources: Resources that each rank needs.
        group: Ray node group whose machines the ranks must run on; None: any machine.
    """

    name: str
    kind: str
    num_ranks: int
    resources: Mapping[str, float]
    group: str | None = None

    def machines_in_group(self, machines: Sequence[Machine]) -> list[Machine]:
        return [m for m in machines if self.group in (None, m.labels.get(GROUP_LABEL))]

    def specs(
        self, epoch: int, hosts: Sequence[str], placement_group_epoch: int = 0
    ) -> list[RankSpec]:
        """Return the specs of all ranks for a new epoch.

        ``hosts`` has the address of each rank. For ``placement_group_epoch`` see RankSpec.
        """
        assert len(hosts) == self.num_ranks, f"{self.num_ranks} ranks on {hosts}"
        return [
            RankSpec(
                gang=self.name,
                kind=self.kind,
                epoch=epoch,
                rank=rank,
                num_ranks=self.num_ranks,
                host=host,
                placement_group_epoch=placement_group_epoch,
            )
            for rank, host in enumerate(hosts)
        ]


@dataclass(frozen=True, slots=True)
class EpochLaunch:
    """Processes to start for an epoch.

    Attributes:
        placement_group_epoch: Epoch of the placement group. If it equals ``epoch``, the group is
            created.
        missing: Ranks to start.
        placement: Expert placement, None for the default placement.
    """

    epoch: int
    placement_group_epoch: int
    missing: Sequence[int]
    placement: Placement | None = None


def plan_gangs(config: TandemConfig) -> list[GangPlan]:
    """Return prefill, then decode gangs; colocated gangs use the decode section."""
    gangs = []
    for kind in config.kinds:
        section = config.of_kind(kind)
        gpus = {"GPU": 1.0} if section.device == "cuda" else {}
        resources = {"CPU": section.num_threads, **gpus}
        for index in range(section.replicas):
            gangs.append(
                GangPlan(
                    name=f"{kind}-{index}",
                    kind=kind,
                    num_ranks=section.dp_size,
                    resources=resources,
                    group=section.node_group,
                )
            )
    return gangs


def choose_label_selector(plan: GangPlan, machines: Sequence[Machine]) -> dict[str, str]:
    """Return the labels that a machine must have to run ranks of a gang.

    These are the label of its group and, if the group has KubeRay replicas, the label of one
    replica. A replica with capacity for the whole gang is preferred. Gangs that choose at the same
    time choose different replicas.
    """
    capacity = Counter[str]()
    for machine in plan.machines_in_group(machines):
        of_each = (machine.free.get(name, 0) // num for name, num in plan.resources.items())
        capacity[machine.labels.get(REPLICA_LABEL, "")] += int(min(of_each))
    labels = {} if plan.group is None else {GROUP_LABEL: plan.group}
    if not (names := sorted(name for name in capacity if name)):
        return labels
    fits = [name for name in names if capacity[name] >= plan.num_ranks] or names
    return labels | {REPLICA_LABEL: fits[int(plan.name.rpartition("-")[2]) % len(fits)]}


def no_capacity_message(plan: GangPlan, machines: Sequence[Machine]) -> str:
    """Return a message about the resources that a gang lacks in a Ray of these machines."""
    section = PREFILL if plan.kind == PREFILL else DECODE
    if not (machines_of_group := plan.machines_in_group(machines)):
        known_groups = (
            sorted({m.labels[GROUP_LABEL] for m in machines if GROUP_LABEL in m.labels}) or "none"
        )
        return (
            f"{section}.node_group={plan.group!r}: {plan.name} needs a machine of this group, and "
            f"this Ray cluster has none; its groups are {known_groups} (Ray's label "
            f"{GROUP_LABEL}, on Kubernetes the worker group)"
        )
    where = "this Ray cluster" if plan.group is None else f"group {plan.group!r}"
    wants = [
        f"{num:g} {name} for each of {plan.num_ranks} ranks ("
        f"{sum(m.free.get(name, 0) for m in machines_of_group):g} of "
        f"{sum(m.total.get(name, 0) for m in machines_of_group):g} in {where} are free)"
        for name, num in plan.resources.items()
    ]
    return (
        f"{plan.name}: not enough resources: needs {'; '.join(wants)}; add machines, or lower "
        f"{section}.dp_size, {section}.replicas or {section}.num_threads"
    )


def host_addresses(host: str, machines: Sequence[str], addresses: Mapping[str, str]) -> list[str]:
    """Return the address that each rank listens on, given the machine of each rank.

    The address is ``host`` (``kv_transfer.host``) unless that is "auto". Then it is the address by
    which Ray knows the machine: the loopback address in a local Ray, otherwise one that other
    machines can reach.
    """
    return [addresses[machine] if host == AUTO else host for machine in machines]


def adoptable_ranks(states: Sequence[RankState]) -> dict[str, list[RankState]]:
    """Return the ranks to adopt, by gang and in order.

    These are the ranks without failure whose configuration is that of the latest epoch. They must
    be in the gang's latest placement group. If a rank has several processes, the latest one counts.
    """
    latest = max(states, key=lambda state: state.spec.epoch, default=None)
    config_json = None if latest is None else latest.config_json
    well = [s for s in states if s.failure is None and s.config_json == config_json]
    group_epochs: dict[str, int] = {}
    for state in well:
        group_epochs[state.spec.gang] = max(
            placement_group_epoch_of(state.spec), group_epochs.get(state.spec.gang, 0)
        )
    ranks: dict[str, dict[int, RankState]] = {}
    for state in sorted(well, key=lambda state: state.spec.process_epoch or state.spec.epoch):
        if placement_group_epoch_of(state.spec) == group_epochs[state.spec.gang]:
            ranks.setdefault(state.spec.gang, {})[state.spec.rank] = state
    return {gang: [found[rank] for rank in sorted(found)] for gang, found in ranks.items()}


def placement_group_epoch_of(spec: RankSpec) -> int:
    """Return the epoch for which the rank's placement group was created."""
    return spec.placement_group_epoch or spec.epoch


def is_complete(states: Sequence[RankState]) -> bool:
    """Return whether ``states`` are all ranks of one epoch of a gang."""
    epochs = {state.spec.epoch for state in states}
    return len(epochs) == 1 and len(states) == states[0].spec.num_ranks
