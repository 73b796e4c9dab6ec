"""A decode rank put together from its settings."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from core.control import Control
from core.info import DECODE, NodeInfo
from core.settings import NodeSettings
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


async def build(settings: NodeSettings, find_owner: Callable[[str], Control]) -> DecodeRank:
    """Load the checkpoint and start the rank. Raises ValueError for the user's mistakes."""
    loaded = await asyncio.to_thread(load_model, settings)
    num_pages = settings.num_pages or default_num_pages(settings, loaded.max_model_len)
    pool = PagePool(num_pages, settings.page_size)
    loop = EngineLoop(f"engine-{settings.name}")
    caches = loaded.allocate(num_pages, settings.page_size)
    maker = channel_maker(settings)
    rank = await assemble(settings, loaded, pool, caches, loop, maker, find_owner)
    loop.start()
    return rank


async def assemble(
    settings: NodeSettings,
    loaded: LoadedModel,
    pool: PagePool,
    caches: Caches,
    loop: EngineLoop,
    maker: ChannelMaker,
    find_owner: Callable[[str], Control],
    max_pages: int | None = None,
) -> DecodeRank:
    """A rank over parts it may share with a prefill rank; ``loop`` is started by the caller."""
    epoch = uuid.uuid4().hex
    transfer_caches = caches_of(caches, pool, loaded.dtype_name, loaded.config.identity())
    fingerprint = transfer_caches.layout.fingerprint()
    sink = Sink(
        f"{settings.name}:{epoch}", transfer_caches, loop, maker, transfer_options(settings)
    )
    node = DecodeNode(
        settings.name, epoch, fingerprint, pool, loaded.device, loop, sink, find_owner
    )
    node.engine = engine = DecodeEngine(
        loaded,
        pool,
        caches,
        EngineOptions(
            max_rows=settings.max_rows,
            max_drafts=settings.num_drafts,
            max_pages=max_pages,
            loop=settings.loop,
            draft_length=settings.draft_length,
            buckets=settings.batch_buckets,
        ),
        epoch=epoch,
        on_frame=node.publish,
    )
    loop.add(engine)
    info = describe(
        settings,
        loaded,
        kind=DECODE,
        epoch=epoch,
        fingerprint=fingerprint,
        num_pages=pool.num_pages,
        num_drafts=engine.max_drafts,
    )
    return DecodeRank(info, node, engine, loop)
