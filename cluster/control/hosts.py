"""The address that each node listens on, where the user left that to us."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from cluster.control.plan import NodePlan


def with_hosts(
    plans: Sequence[NodePlan], machine_of_plan: Sequence[str], addresses: Mapping[str, str]
) -> list[NodePlan]:
    """``plans``, each listening on the address of the machine it was placed on, by Ray node id;
    as they are, on the loopback interface, when there is but one machine."""
    if len(addresses) == 1:
        return list(plans)
    return [
        replace(plan, spec=replace(plan.spec, host=addresses[machine]))
        for plan, machine in zip(plans, machine_of_plan, strict=True)
    ]


def placed(plans: Sequence[NodePlan], group: Any) -> list[NodePlan]:
    """``with_hosts`` by where Ray put the bundles of a ready placement group."""
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    machine_of_plan = [table[index] for index in range(len(plans))]
    machines = [machine for machine in ray.nodes() if machine["Alive"]]
    addresses = {machine["NodeID"]: machine["NodeManagerAddress"] for machine in machines}
    return with_hosts(plans, machine_of_plan, addresses)
