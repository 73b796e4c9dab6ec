"""A prefill rank put together from its settings."""

import asyncio
import uuid
from dataclasses import dataclass

from core.info import PREFILL, NodeInfo
from core.settings import NodeSettings
from kv_transfer.base import ChannelMaker
from kv_transfer.build import caches_of, channel_maker, transfer_options
from kv_transfer.pages import PagePool
from kv_transfer.source import Source
from model.cache import Caches
from model.loaded import LoadedModel, default_num_pages, describe, load_model
from prefill_node.engine import PrefillEngine
from prefill_node.node import PrefillNode
from runtime.engine_loop import EngineLoop


@dataclass(frozen=True, slots=True)
class PrefillRank:
    """Everything one prefill rank runs; ``stop`` ends it in order."""

    info: NodeInfo
    node: PrefillNode
    engine: PrefillEngine
    loop: EngineLoop

    async def handle(self, method: str, payload: bytes) -> bytes:
        return await self.node.handle(method, payload)

    async def stop(self) -> None:
        await self.node.source.stop()
        await asyncio.to_thread(self.loop.stop)


async def build(settings: NodeSettings) -> PrefillRank:
    """Load the checkpoint and start the rank. Raises ValueError for the user's mistakes."""
    loaded = await asyncio.to_thread(load_model, settings)
    num_pages = settings.num_pages or default_num_pages(settings, loaded.max_model_len)
    pool = PagePool(num_pages, settings.page_size)
    loop = EngineLoop(f"engine-{settings.name}")
    caches = loaded.allocate(num_pages, settings.page_size)
    rank = await assemble(settings, loaded, pool, caches, loop, channel_maker(settings))
    loop.start()
    return rank


async def assemble(
    settings: NodeSettings,
    loaded: LoadedModel,
    pool: PagePool,
    caches: Caches,
    loop: EngineLoop,
    maker: ChannelMaker,
) -> PrefillRank:
    """A rank over parts it may share with a decode rank; ``loop`` is started by the caller."""
    epoch = uuid.uuid4().hex
    transfer_caches = caches_of(caches, pool, loaded.dtype_name, loaded.config.identity())
    engine = PrefillEngine(
        loaded,
        pool,
        caches,
        max_batch_tokens=settings.max_batch_tokens,
        on_progress=lambda progress: node.on_progress(progress),
    )
    node = PrefillNode(
        settings.name,
        epoch,
        pool,
        loop,
        engine,
        ship_hidden=settings.first_step == "ship_hidden",
    )
    node.source = Source(
        epoch, transfer_caches, loop, maker, node.on_release, transfer_options(settings)
    )
    await node.source.start()
    loop.add(engine)
    info = describe(
        settings,
        loaded,
        kind=PREFILL,
        epoch=epoch,
        fingerprint=transfer_caches.layout.fingerprint(),
        num_pages=pool.num_pages,
        num_drafts=settings.num_drafts,
    )
    return PrefillRank(info, node, engine, loop)
