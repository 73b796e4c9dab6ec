"""Chunks that P has gathered into staging, and that wait for D to ask for their sending."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from core.errors import HandoverError
from core.identity import Identity
from kv_transfer import messages as m
from kv_transfer.caches import staged
from kv_transfer.layout import Group
from kv_transfer.offered import OfferBook
from kv_transfer.side import Side
from kv_transfer.staging import Buffer


@dataclass(slots=True, eq=False)
class Chunk:
    """``data`` is the part of ``buffer`` that is sent; ``share`` is what the buffer is one of."""

    buffer: Buffer
    data: Tensor
    share: asyncio.Semaphore
    ends_at: float


class GatheredChunks:
    """By (identity, ticket), so a chunk outlives the channel it was meant for. Who gathers but
    never sends loses the chunk: when its identity ends, or at a deadline. A decode rank has at
    most half of staging for its chunks, so one that stands still does not stop the others.

    Belongs to one asyncio loop. Gathers run beside the steps of prefill, which write other
    entries; what was read is good if its pages have not changed hands by then.
    """

    def __init__(self, side: Side, book: OfferBook) -> None:
        self._side = side
        self._book = book
        self._chunks: dict[tuple[Identity, int], Chunk] = {}
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def gather(self, ask: m.Gather) -> m.Gathered:
        """Gather one chunk and keep it. Must run to its end.

        Raises HandoverError for an identity or range that is not to be had, StalePages when its
        pages changed hands.
        """
        group = self._check_range(ask)
        chunk = await self._reserve(ask, group)
        try:
            first_page, generations = await self._read(ask, group, chunk.data)
            key = (ask.identity, ask.ticket)
            if key in self._chunks:
                raise HandoverError(f"{ask.identity}: chunk {ask.ticket} was gathered before")
        except BaseException:
            self.free(chunk)
            raise
        chunk.ends_at = time.monotonic() + self._side.deadlines.gathered_s
        self._chunks[key] = chunk
        return m.Gathered(chunk.data.nbytes, first_page, generations)

    def take(self, identity: Identity, ticket: int) -> Chunk:
        """The caller owns it now. Raises HandoverError where there is none any more."""
        chunk = self._chunks.pop((identity, ticket), None)
        if chunk is None:
            self._book.need(identity)
            raise HandoverError(f"{identity}: chunk {ticket} is not gathered, or no more")
        return chunk

    def free(self, chunk: Chunk) -> None:
        chunk.share.release()
        self._side.staging.free(chunk.buffer)

    def quarantine(self, chunk: Chunk, terminal: "Future[None]") -> None:
        """Free a chunk only once its channel can touch it no more."""
        chunk.share.release()
        self._side.staging.quarantine(chunk.buffer, terminal)

    def drop(self, identity: Identity) -> None:
        """Free all chunks of an identity that has ended."""
        self._free_where(lambda key, _: key[0] == identity)

    def sweep(self) -> None:
        """Free what nobody asked for in time."""
        now = time.monotonic()
        self._free_where(lambda _, chunk: chunk.ends_at <= now)

    def _free_where(self, holds: Callable[[tuple[Identity, int], Chunk], bool]) -> None:
        for key in [key for key, chunk in self._chunks.items() if holds(key, chunk)]:
            self.free(self._chunks.pop(key))

    async def _reserve(self, ask: m.Gather, group: Group) -> Chunk:
        staging = self._side.staging
        share = self._shares.get(ask.peer)
        if share is None:
            share = self._shares[ask.peer] = asyncio.Semaphore(max(1, staging.num_buffers // 2))
        await share.acquire()
        try:
            buffer = await staging.reserve()
        except BaseException:
            share.release()
            raise
        return Chunk(buffer, staged(group, buffer, ask.hi - ask.lo), share, float("inf"))

    async def _read(self, ask: m.Gather, group: Group, out: Tensor) -> tuple[int, tuple[int, ...]]:
        caches, computed = self._side.caches, self._book.need(ask.identity).computed
        size = caches.pool.page_size
        first, last = ask.lo // size, -(-ask.hi // size)
        generations = computed.generations[first:last]

        where = group, computed.pages, ask.lo, ask.hi
        reading = self._side.copier.submit(caches.gather, *where, out, computed.mark)
        await asyncio.wrap_future(reading)
        self._book.need(ask.identity)
        caches.pool.check_generations(computed.pages[first:last], generations)
        return first, generations

    def _check_range(self, ask: m.Gather) -> Group:
        layout = self._side.caches.layout
        index = layout.index(ask.group)
        group, available = layout.groups[index], self._book.need(ask.identity).computed.num_tokens
        if not 0 <= ask.lo < ask.hi <= available[index]:
            raise HandoverError(
                f"tokens [{ask.lo}, {ask.hi}) asked for, {available[index]} computed"
            )
        num_bytes = (ask.hi - ask.lo) * group.bytes_per_token_all_layers
        chunk_bytes = self._side.staging.chunk_bytes
        if num_bytes > chunk_bytes:
            raise HandoverError(f"chunks of {chunk_bytes} B here, {num_bytes} there")
        return group
