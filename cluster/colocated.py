"""Both engines in one rank over one page pool: for comparison, debugging, small machines.

The hand-over is the same code as between machines; only its wire is a copy in memory.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from cluster.plan import COLOCATED
from core.failure import encode_failure
from core.mailbox import EngineLoop
from core.node import NodeInfo
from core.settings import NodeSettings
from core.wire import pack, unpack
from decode_node.build import DecodeRank
from decode_node.build import assemble as assemble_decode
from kv_transfer.control import InProcessControl
from kv_transfer.loopback import LoopbackChannels
from kv_transfer.pages import PagePool
from model.loaded import default_num_pages, load_model
from prefill_node.build import PrefillRank
from prefill_node.build import assemble as assemble_prefill

PREFILL_METHODS = ("prefill", "cancel")


class ColocatedRank:
    """A prefill and a decode rank that share model, pages and engine thread."""

    def __init__(self, prefill: PrefillRank, decode: DecodeRank) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def info(self) -> NodeInfo:
        """The decode rank's, under the epoch that offers carry: the prefill rank's."""
        return replace(self.decode.info, kind=COLOCATED, epoch=self.prefill.info.epoch)

    async def handle(self, method: str, payload: bytes) -> bytes:
        rank = self.prefill if method in PREFILL_METHODS else self.decode
        return await rank.node.handle(method, payload)

    async def stop(self) -> None:
        await self.decode.node.stop()
        await self.prefill.stop()


async def build(settings: NodeSettings) -> ColocatedRank:
    """Load the checkpoint once and start both engines on one thread."""
    loaded = await asyncio.to_thread(load_model, settings)
    num_pages = settings.num_pages or 2 * default_num_pages(settings, loaded.max_model_len)
    pool = PagePool(num_pages, settings.page_size)
    loop = EngineLoop(f"engine-{settings.name}")
    caches = loaded.allocate(num_pages, settings.page_size)
    maker = LoopbackChannels()
    prefill = await assemble_prefill(settings, loaded, pool, caches, loop, maker)
    control = InProcessControl(prefill.node.handle)
    decode = await assemble_decode(
        settings, loaded, pool, caches, loop, maker, lambda owner: control
    )
    loop.start()
    return ColocatedRank(prefill, decode)


class ColocatedActor:
    """The Ray actor of a colocated rank."""

    def __init__(self, settings: bytes) -> None:
        self._settings = unpack(NodeSettings, settings)
        self._rank: ColocatedRank | None = None

    async def start(self) -> bytes:
        """Packed NodeInfo, or the packed Failure that kept the node from starting."""
        try:
            self._rank = await build(self._settings)
            return pack(self._rank.info)
        except Exception as error:
            return encode_failure(error)

    async def call(self, method: str, payload: bytes) -> bytes:
        assert self._rank is not None, "start comes first"
        return await self._rank.handle(method, payload)

    async def frames(self) -> AsyncIterator[bytes]:
        assert self._rank is not None, "start comes first"
        async for frame in self._rank.decode.node.frames():
            yield frame

    async def stop(self) -> None:
        if self._rank is not None:
            await self._rank.stop()
