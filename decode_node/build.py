"""A decode rank made from what it is told."""

from collections.abc import Callable

from core.config import TandemConfig
from core.control import Control
from core.membership import RankSpec
from decode_node.node import DecodeNode
from kv_transfer.channel import channel_maker
from kv_transfer.side import Side
from kv_transfer.sink import Sink
from model.loaded import OnLoaded
from runtime.parts import load_parts


async def build(
    spec: RankSpec,
    config: TandemConfig,
    find_owner: Callable[[str, int], Control],
    on_loaded: OnLoaded | None = None,
) -> DecodeNode:
    """Load the checkpoint and start the rank. Raises ValueError for the user's mistakes."""
    parts = await load_parts(spec, config, on_loaded)
    maker = channel_maker(config, spec.kind, spec.host)
    side = Side(parts.transfer_caches(), parts.loop, maker, config.kv_transfer)
    sink = Sink(spec.name, side)
    node = DecodeNode(parts, sink, find_owner)
    await node.listen()
    parts.loop.start()
    return node
