"""Which node processes a config asks for: pure, so that it can be shown before it is done."""

import secrets
from dataclasses import dataclass

from core.config import AUTO, TandemConfig
from core.info import COLOCATED, DECODE, PREFILL
from core.membership import RankSpec

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One rank's process: what it is told, and what it takes of a machine."""

    spec: RankSpec
    resources: dict[str, float]

    def actor_class(self) -> type:
        """The class of its actor, imported only where it is needed."""
        if self.spec.kind == PREFILL:
            from prefill_node.actor import PrefillActor

            return PrefillActor
        if self.spec.kind == DECODE:
            from decode_node.actor import DecodeActor

            return DecodeActor
        from cluster.control.colocated_actor import ColocatedActor

        return ColocatedActor


def plan_nodes(config: TandemConfig) -> list[NodePlan]:
    """Prefill nodes, then decode nodes; colocated nodes follow the decode section."""
    if config.mode == "colocated":
        return [_plan(config, COLOCATED, i) for i in range(config.decode.replicas)]
    prefills = [_plan(config, PREFILL, i) for i in range(config.prefill.replicas)]
    decodes = [_plan(config, DECODE, i) for i in range(config.decode.replicas)]
    return prefills + decodes


def _plan(config: TandemConfig, kind: str, index: int) -> NodePlan:
    section = config.of_kind(kind)
    resources: dict[str, float] = {"CPU": section.num_threads}
    if section.device == "cuda":
        resources["GPU"] = 1
    host = LOOPBACK if config.kv_transfer.host == AUTO else config.kv_transfer.host
    return NodePlan(RankSpec(f"{kind}-{index}", kind, secrets.randbits(53), host=host), resources)
