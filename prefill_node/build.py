"""A prefill rank made from what it is told."""

from core.config import TandemConfig
from core.membership import RankSpec
from kv_transfer.channel import channel_maker
from model.loaded import OnLoaded
from prefill_node.node import PrefillNode
from runtime.parts import load_parts


async def build(
    spec: RankSpec, config: TandemConfig, on_loaded: OnLoaded | None = None
) -> PrefillNode:
    """Load the checkpoint and start the rank. Raises ValueError for the user's mistakes."""
    parts = await load_parts(spec, config, on_loaded)
    node = PrefillNode(parts, channel_maker(config, spec.kind, spec.host))
    parts.loop.start()
    return node
