"""A decode rank put together from its settings."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from core.config import TandemConfig
from core.control import Control
from core.info import NodeInfo
from core.membership import RankSpec
from decode_node.engine import DecodeEngine, EngineOptions
from decode_node.node import DecodeNode
from kv_transfer.base import ChannelMaker
from kv_transfer.build import caches_of, channel_maker, transfer_options
from kv_transfer.pages import PagePool
from kv_transfer.sink import Sink
from model.cache import Caches
from model.loaded import LoadedModel, default_num_pages, describe, load_model
from runtime.engine_loop import EngineLoop
from runtime.frames import Frame


@dataclass(frozen=True, slots=True)
class DecodeRank:
    """Everything one decode rank runs; ``stop`` ends it in order."""

    info: NodeInfo
    node: DecodeNode
    engine: DecodeEngine
    loop: EngineLoop

    async def handle(self, method: str, payload: bytes) -> bytes:
        return await self.node.handle(method, payload)

    def subscribe(self, reader: Callable[[Frame], None]) -> Callable[[], None]:
        return self.node.subscribe(reader)

    async def stop(self) -> None:
        await self.node.stop()
        await asyncio.to_thread(self.loop.stop)


async def build(
    spec: RankSpec, config: TandemConfig, find_owner: Callable[[str], Control]
) -> DecodeRank:
    """Load the checkpoint and start the rank. Raises ValueError for the user's mistakes."""
    loaded = await asyncio.to_thread(load_model, config, spec.kind)
    num_pages = config.kv.num_pages or default_num_pages(config, loaded.max_model_len)
    pool = PagePool(num_pages, config.kv.page_size)
    loop = EngineLoop(f"engine-{spec.gang}")
    caches = loaded.allocate(num_pages, config.kv.page_size)
    maker = channel_maker(config, spec.kind, spec.host)
    rank = await assemble(spec, config, loaded, pool, caches, loop, maker, find_owner)
    loop.start()
    return rank


async def assemble(
    spec: RankSpec,
    config: TandemConfig,
    loaded: LoadedModel,
    pool: PagePool,
    caches: Caches,
    loop: EngineLoop,
    maker: ChannelMaker,
    find_owner: Callable[[str], Control],
    max_pages: int | None = None,
) -> DecodeRank:
    """A rank over parts it may share with a prefill rank; ``loop`` is started by the caller."""
    transfer_caches = caches_of(caches, pool, loaded.dtype_name, loaded.config.identity())
    fingerprint = transfer_caches.layout.fingerprint()
    sink = Sink(spec.name, transfer_caches, loop, maker, transfer_options(config))
    node = DecodeNode(
        spec.gang, spec.epoch, fingerprint, pool, loaded.device, loop, sink, find_owner
    )
    node.engine = engine = DecodeEngine(
        loaded,
        pool,
        caches,
        EngineOptions(
            max_rows=config.decode.max_rows,
            max_drafts=config.speculation.num_tokens,
            max_pages=max_pages,
            loop=config.decode.loop,
            draft_length=config.speculation.draft_length,
            buckets=config.decode.batch_buckets,
        ),
        epoch=spec.epoch,
        on_frame=node.publish,
    )
    loop.add(engine)
    info = describe(
        spec,
        config,
        loaded,
        fingerprint=fingerprint,
        num_pages=pool.num_pages,
        num_drafts=engine.max_drafts,
    )
    return DecodeRank(info, node, engine, loop)
