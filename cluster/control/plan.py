"""Which node processes a config asks for: pure, so that it can be shown before it is done."""

from dataclasses import dataclass

from core.config import AUTO, DecodeConfig, PrefillConfig, TandemConfig
from core.info import DECODE, PREFILL
from core.schema import pack
from core.settings import NodeSettings

COLOCATED = "colocated"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One rank's process: its kind, its settings, and what it takes of a machine."""

    kind: str
    settings: NodeSettings
    resources: dict[str, float]

    def packed_settings(self) -> bytes:
        return pack(self.settings)

    def actor_class(self) -> type:
        """The class of its actor, imported only where it is needed."""
        if self.kind == PREFILL:
            from prefill_node.actor import PrefillActor

            return PrefillActor
        if self.kind == DECODE:
            from decode_node.actor import DecodeActor

            return DecodeActor
        from cluster.control.colocated_actor import ColocatedActor

        return ColocatedActor


def plan_nodes(config: TandemConfig) -> list[NodePlan]:
    """Prefill nodes, then decode nodes; colocated nodes follow the decode section."""
    if config.mode == "colocated":
        return [_plan(config, COLOCATED, i, config.decode) for i in range(config.decode.replicas)]
    prefills = [_plan(config, PREFILL, i, config.prefill) for i in range(config.prefill.replicas)]
    decodes = [_plan(config, DECODE, i, config.decode) for i in range(config.decode.replicas)]
    return prefills + decodes


def _plan(
    config: TandemConfig, kind: str, index: int, section: PrefillConfig | DecodeConfig
) -> NodePlan:
    settings = NodeSettings(
        name=f"{kind}-{index}",
        model_path=str(config.model.path),
        dtype=config.model.dtype,
        device=section.device,
        num_threads=section.num_threads,
        max_model_len=config.model.max_model_len,
        think_tokens=config.model.think_tokens,
        drafter=config.speculation.drafter,
        num_drafts=config.speculation.num_tokens,
        first_step=config.speculation.first_step,
        draft_length=config.speculation.draft_length,
        loop=config.decode.loop,
        batch_buckets=config.decode.batch_buckets,
        page_size=config.kv.page_size,
        num_pages=config.kv.num_pages,
        max_rows=config.decode.max_rows,
        max_batch_tokens=config.prefill.max_batch_tokens,
        backend=config.kv_transfer.backend,
        host=LOOPBACK if config.kv_transfer.host == AUTO else config.kv_transfer.host,
        lease_s=config.kv_transfer.lease_s,
        staging_bytes=config.kv_transfer.staging_bytes,
    )
    resources: dict[str, float] = {"CPU": section.num_threads}
    if section.device == "cuda":
        resources["GPU"] = 1
    return NodePlan(kind, settings, resources)
