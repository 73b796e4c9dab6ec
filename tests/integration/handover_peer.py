"""A prefill rank that computes made-up values, as the peer in hand-over tests."""

import asyncio
import hashlib
import os
import struct
import threading
from functools import partial
from typing import Any

import msgpack
import torch

from tandem.core.config import KvTransferConfig
from tandem.core.control import Service
from tandem.core.identity import Identity
from tandem.kv_transfer.caches import PagedCaches
from tandem.kv_transfer.channel import ChannelFactory
from tandem.kv_transfer.endpoint import Deadlines, TransferEndpoint
from tandem.kv_transfer.layout import Group, Layout
from tandem.kv_transfer.messages import Seal
from tandem.kv_transfer.pages import PagePool
from tandem.kv_transfer.source import Source
from tandem.runtime.engine_loop import EngineLoop

HOST, EPOCH, DEADLINE_S, WIDTH = "127.0.0.1", 2, 3.0, 24
LAYOUT = Layout((Group("main", 3, 4 * WIDTH), Group("mtp", 1, 4 * WIDTH)), "float32", "tiny")
# Small chunks: 3 layers of 96 B make 288 B per token, so a chunk holds 7 tokens.
CONFIG = KvTransferConfig.model_construct(lease_s=1.2, staging_bytes=4 * 2048, checksums=True)
DEADLINES = Deadlines(wait_s=0.5, call_s=3.0, progress_s=4.0)


def values(request_id: str, layer: int, num_tokens: int) -> torch.Tensor:
    """Return a request's cache of a layer, numbered over all groups: [num_tokens, WIDTH]."""
    digest = hashlib.sha256(f"{request_id}/{layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(num_tokens, WIDTH, generator=generator)


class Rank:
    """Caches, pages and an engine thread, which both ranks of a hand-over have."""

    def __init__(self, name: str, page_size: int, num_pages: int, layout: Layout = LAYOUT) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.tensors = {
            group.name: [torch.zeros(num_pages * page_size, WIDTH) for _ in range(group.num_layers)]
            for group in layout.groups
        }
        self.caches = PagedCaches(self.tensors, self.pool, layout.dtype, layout.model)
        assert self.caches.layout == layout
        self.engine = EngineLoop(name)
        self.engine.start()

    def layers(self) -> list[torch.Tensor]:
        return [tensor for tensors in self.tensors.values() for tensor in tensors]

    def slots(self, pages: list[int], lo: int, hi: int) -> list[int]:
        size = self.pool.page_size
        return [pages[t // size] * size + t % size for t in range(lo, hi)]


class Prefill(Rank):
    """A prefill engine that computes made-up values, scripted by ``test.*`` control calls."""

    def __init__(
        self,
        channel_factory: ChannelFactory,
        deadlines: Deadlines = DEADLINES,
        lease_s: float = CONFIG.lease_s,
    ) -> None:
        super().__init__("prefill", page_size=5, num_pages=200)
        self.channel_factory = channel_factory
        config = CONFIG.model_copy(update={"lease_s": lease_s})
        self.source = Source(
            TransferEndpoint(self.caches, self.engine, channel_factory, config, deadlines)
        )
        self.service = Service("prefill", EPOCH, self.source.methods)
        self.pages: dict[Identity, list[int]] = {}
        self.num_computed: dict[Identity, int] = {}
        self.released: list[Identity] = []
        self.asked: list[str] = []
        self.may_send, self.may_gather = asyncio.Event(), threading.Event()
        self.may_send.set()
        self.may_gather.set()
        self.caches.gather = self._gather  # type: ignore[method-assign]

    def _gather(self, *args: Any) -> None:
        self.may_gather.wait()
        type(self.caches).gather(self.caches, *args)

    def on_release(self, key: Identity) -> None:
        assert threading.current_thread().name == "prefill"
        self.pool.release(self.pages.pop(key, []))
        self.released.append(key)

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes:
        if not method.startswith("test."):
            self.asked.append(method)
            if method == "send":
                await self.may_send.wait()
            return await self.service.handle(epoch, method, payload)
        order = msgpack.unpackb(payload)
        reply = await getattr(self, method.removeprefix("test."))(**order)
        return msgpack.packb(reply)

    async def run(self, request_id: str, attempt: int, num_tokens: int, step: int,
                  delay_s: float, seal: bool) -> None:  # fmt: skip
        """Prefill in chunks of ``step``."""
        await self.open(request_id, attempt)
        for hi in range(step, num_tokens + step, step):
            # time: a slow prefill, for leases and idle channels
            await asyncio.sleep(delay_s)
            await self.go_on(request_id, attempt, min(hi, num_tokens), num_tokens, seal)

    async def open(self, request_id: str, attempt: int) -> None:
        key = Identity(request_id, attempt=attempt)
        await self.engine.call(lambda: self.source.open(key, lambda: self.on_release(key)))

    async def go_on(self, request_id: str, attempt: int, hi: int, num_tokens: int,
                    seal: bool) -> None:  # fmt: skip
        """Compute the chunk that ends at ``hi``."""
        key = Identity(request_id, attempt=attempt)
        await self.engine.call(partial(self.compute, key, hi, num_tokens, seal))

    def compute(self, key: Identity, hi: int, num_tokens: int, seal: bool) -> None:
        if key in self.released:
            return
        pages = self.pages.setdefault(key, [])
        pages += self.pool.allocate(self.pool.num_pages_for(hi) - len(pages))
        for layer, cache in enumerate(self.layers()):
            cache[self.slots(pages, 0, hi)] = values(key.request_id, layer, num_tokens)[:hi]
        self.num_computed[key] = hi
        hidden = struct.pack("4f", 1, 2, 3, 4)
        told = Seal(77, hidden, "float32") if seal and hi == num_tokens else None
        self.source.advance(key, pages, hi, told)

    async def seal(self, request_id: str, attempt: int) -> None:
        """Seal a prefill that was run without a seal, in a separate step."""
        key = Identity(request_id, attempt=attempt)

        def end() -> None:
            self.source.advance(key, self.pages[key], self.num_computed[key], Seal(77))

        await self.engine.call(end)

    async def fail(self, request_id: str, attempt: int) -> None:
        key = Identity(request_id, attempt=attempt)
        await self.engine.call(lambda: self.source.fail(key, "the prompt was refused"))

    async def steal_page(self, request_id: str, attempt: int, number: int) -> None:
        """Simulate a bug whose data must never be used: a page changes owner while it is
        offered."""

        def steal() -> None:
            page = self.pages[Identity(request_id, attempt=attempt)][number]
            self.pool.release([page])
            taken = self.pool.allocate(self.pool.num_free)
            assert page in taken
            self.pool.release([p for p in taken if p != page])

        await self.engine.call(steal)

    async def die(self, in_gather: bool) -> None:
        def end(*_: Any) -> None:
            os._exit(9)

        if in_gather:
            self.caches.gather = end  # type: ignore[method-assign]
        else:
            end()

    async def hold_sends(self) -> None:
        self.may_send.clear()

    async def let_sends_go(self) -> None:
        self.may_send.set()

    async def report(self) -> dict[str, Any]:
        self.source._endpoint.staging.check_integrity()
        await self.engine.call(self.pool.check_integrity)
        used, asked = self.pool.num_pages - 1 - self.pool.num_free, self.asked
        self.asked = []
        return {**self.source.counts(), "pages": used, "released": len(self.released),
                "asked": asked}  # fmt: skip
