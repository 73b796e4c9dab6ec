"""The actor that owns the nodes. It is detached: gateways come and go, nodes stay.

Ray actors die with their owner, so nodes are created here and nowhere else.
"""

import asyncio
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.control.hosts import placed
from cluster.control.plan import NodePlan, plan_nodes
from core.config import AUTO, TandemConfig
from core.errors import Overloaded
from core.schema import encode_failure, pack

NAMESPACE = "tandem"
CONTROLLER = "controller"
PLACEMENT_TIMEOUT_S = 60


class Controller:
    """Starts and stops the nodes of one cluster."""

    def __init__(self, config_json: str) -> None:
        self._config_json = config_json
        config = TandemConfig.model_validate_json(config_json)
        self._plans = plan_nodes(config)
        self._finds_hosts = config.kv_transfer.host == AUTO
        self._nodes: dict[str, Any] = {}
        self._group: Any = None

    async def start(self) -> list[bytes]:
        """Start every node; each one's packed NodeInfo, or the packed Failure it met.

        Nodes load their checkpoints at the same time.
        """
        bundles = [plan.resources for plan in self._plans]
        self._group = placement_group(bundles, strategy="SPREAD")
        # Group.ready() would start a worker process of its own just to tell.
        if not await asyncio.to_thread(self._group.wait, PLACEMENT_TIMEOUT_S):
            return [encode_failure(Overloaded(f"Ray has no room for {bundles}"))]
        if self._finds_hosts:
            self._plans = await asyncio.to_thread(placed, self._plans, self._group)
        for index, plan in enumerate(self._plans):
            self._nodes[plan.spec.gang] = self._create(plan, index)
        starts = [node.start.remote() for node in self._nodes.values()]
        return list(await asyncio.gather(*starts))

    async def stop(self) -> None:
        """Stop every node, then let their processes go."""
        stops = [node.stop.remote() for node in self._nodes.values()]
        await asyncio.gather(*stops, return_exceptions=True)
        for node in self._nodes.values():
            ray.kill(node)
        self._nodes.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _create(self, plan: NodePlan, bundle: int) -> Any:
        return (
            ray.remote(plan.actor_class())
            .options(
                name=plan.spec.gang,
                namespace=NAMESPACE,
                num_cpus=plan.resources["CPU"],
                num_gpus=plan.resources.get("GPU", 0),
                max_concurrency=10_000,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote(pack(plan.spec), self._config_json)
        )
