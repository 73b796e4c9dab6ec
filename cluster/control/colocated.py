"""Both engines in one rank over one page pool: for comparison, debugging, small machines.

The hand-over is the same code as between machines; only its wire is a copy in memory.
"""

import asyncio
from collections.abc import Callable

from core.config import TandemConfig
from core.control import InProcessControl
from core.info import NodeInfo
from core.membership import RankSpec
from decode_node.build import DecodeRank
from decode_node.build import assemble as assemble_decode
from kv_transfer.loopback import LoopbackChannels
from kv_transfer.pages import PagePool
from model.loaded import default_num_pages, load_model
from prefill_node.build import PrefillRank
from prefill_node.build import assemble as assemble_prefill
from runtime.engine_loop import EngineLoop
from runtime.frames import Frame

PREFILL_METHODS = ("prefill", "cancel")


class ColocatedRank:
    """A prefill and a decode rank that share model, pages and engine thread."""

    def __init__(self, prefill: PrefillRank, decode: DecodeRank) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def info(self) -> NodeInfo:
        return self.decode.info

    async def handle(self, method: str, payload: bytes) -> bytes:
        rank = self.prefill if method in PREFILL_METHODS else self.decode
        return await rank.node.handle(method, payload)

    def subscribe(self, reader: Callable[[Frame], None]) -> Callable[[], None]:
        return self.decode.subscribe(reader)

    async def stop(self) -> None:
        await self.decode.node.stop()
        await self.prefill.stop()


async def build(spec: RankSpec, config: TandemConfig) -> ColocatedRank:
    """Load the checkpoint once and start both engines on one thread."""
    loaded = await asyncio.to_thread(load_model, config, spec.kind)
    num_pages = config.kv.num_pages or 2 * default_num_pages(config, loaded.max_model_len)
    pool = PagePool(num_pages, config.kv.page_size)
    loop = EngineLoop(f"engine-{spec.gang}")
    caches = loaded.allocate(num_pages, config.kv.page_size)
    maker = LoopbackChannels()
    prefill = await assemble_prefill(spec, config, loaded, pool, caches, loop, maker)
    control = InProcessControl(prefill.node.handle)
    decode = await assemble_decode(
        spec,
        config,
        loaded,
        pool,
        caches,
        loop,
        maker,
        lambda owner: control,
        # A sequence that goes on after preemption is held twice while it is handed over.
        max_pages=(num_pages - 1) // 2,
    )
    loop.start()
    return ColocatedRank(prefill, decode)
