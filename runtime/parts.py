"""What a rank is made of, whatever it computes."""

import asyncio
from dataclasses import dataclass

from core.config import TandemConfig
from core.info import NodeInfo
from core.membership import RankSpec
from kv_transfer import caches as transfer
from kv_transfer.pages import PagePool
from model.cache import Caches
from model.loaded import LoadedModel, OnLoaded, default_num_pages, describe, load_model
from runtime.engine_loop import EngineLoop


@dataclass(frozen=True, slots=True)
class RankParts:
    """``loop`` is not started; pages and caches belong to its thread."""

    spec: RankSpec
    config: TandemConfig
    loaded: LoadedModel
    pool: PagePool
    caches: Caches
    loop: EngineLoop

    def transfer_caches(self) -> transfer.Caches:
        """The same memory as the hand-over sees it."""
        dtype, model = self.loaded.dtype_name, self.loaded.config.identity()
        return transfer.caches_of(self.caches, self.pool, dtype, model)

    def info(self, fingerprint: str, num_drafts: int) -> NodeInfo:
        return describe(
            self.spec,
            self.config,
            self.loaded,
            fingerprint=fingerprint,
            num_pages=self.pool.num_pages,
            num_drafts=num_drafts,
        )


async def load_parts(
    spec: RankSpec, config: TandemConfig, on_loaded: OnLoaded | None = None
) -> RankParts:
    """Load the checkpoint, allocate pages. Raises ValueError for the user's mistakes."""
    loaded = await asyncio.to_thread(load_model, config, spec.kind, on_loaded)
    num_pages = config.kv.num_pages or default_num_pages(config, loaded.max_model_len)
    pool = PagePool(num_pages, config.kv.page_size)
    caches = loaded.allocate(num_pages, config.kv.page_size)
    return RankParts(spec, config, loaded, pool, caches, EngineLoop(f"engine-{spec.gang}"))
