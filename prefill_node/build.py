"""A prefill rank put together from its settings."""

import asyncio
from dataclasses import dataclass

from core.config import TandemConfig
from core.info import NodeInfo
from core.membership import RankSpec
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


async def build(spec: RankSpec, config: TandemConfig) -> PrefillRank:
    """Load the checkpoint and start the rank. Raises ValueError for the user's mistakes."""
    loaded = await asyncio.to_thread(load_model, config, spec.kind)
    num_pages = config.kv.num_pages or default_num_pages(config, loaded.max_model_len)
    pool = PagePool(num_pages, config.kv.page_size)
    loop = EngineLoop(f"engine-{spec.gang}")
    caches = loaded.allocate(num_pages, config.kv.page_size)
    rank = await assemble(
        spec, config, loaded, pool, caches, loop, channel_maker(config, spec.kind, spec.host)
    )
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
) -> PrefillRank:
    """A rank over parts it may share with a decode rank; ``loop`` is started by the caller."""
    transfer_caches = caches_of(caches, pool, loaded.dtype_name, loaded.config.identity())
    engine = PrefillEngine(
        loaded,
        pool,
        caches,
        max_batch_tokens=config.prefill.max_batch_tokens,
        on_progress=lambda progress: node.on_progress(progress),
    )
    node = PrefillNode(
        spec.gang,
        spec.epoch,
        pool,
        loop,
        engine,
        ship_hidden=config.speculation.first_step == "ship_hidden",
    )
    node.source = Source(
        str(spec.epoch),
        transfer_caches,
        loop,
        maker,
        node.on_release,
        transfer_options(config),
    )
    await node.source.start()
    loop.add(engine)
    info = describe(
        spec,
        config,
        loaded,
        fingerprint=transfer_caches.layout.fingerprint(),
        num_pages=pool.num_pages,
        num_drafts=config.speculation.num_tokens,
    )
    return PrefillRank(info, node, engine, loop)
