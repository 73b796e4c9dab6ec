"""P's half of one transfer: check, gather into staging, send."""

import asyncio
from functools import partial

from torch import Tensor

from core.errors import HandoverError
from kv_transfer import messages as m
from kv_transfer.accepted import AcceptedChannels
from kv_transfer.base import Channel
from kv_transfer.caches import Caches, check_chunks, staged
from kv_transfer.engine_thread import EngineThread
from kv_transfer.layout import Group
from kv_transfer.offered import OfferBook, Offered
from kv_transfer.options import TransferOptions
from kv_transfer.staging import Buffer, Fence, StagingPool, fence


class Sender:
    """Owns P's staging. Gathers run on the engine thread, right after the generation check."""

    def __init__(
        self,
        caches: Caches,
        engine: EngineThread,
        channels: AcceptedChannels,
        book: OfferBook,
        options: TransferOptions,
        device: str,
    ) -> None:
        check_chunks(caches.layout, options.chunk_bytes)
        self.staging = StagingPool(options.staging_bytes, options.chunk_bytes, options.pin, device)
        self._caches = caches
        self._engine = engine
        self._channels = channels
        self._book = book
        self._options = options

    async def send(self, ask: m.Send) -> m.Sent:
        """Gather one chunk and send it; D's receive is launched already.

        Must run to its end. Raises HandoverError for a key, range or transfer id that is not
        to be had, StalePages when its pages changed hands; the channel is gone then.
        """
        channel = await self._channels.get(ask.nonce)
        try:
            if ask.transfer_id != channel.num_transfers:
                raise HandoverError(
                    f"transfer {channel.num_transfers} is next here, {ask.transfer_id} there"
                )
            entry = self._book.need((ask.request_id, ask.attempt))
            group = self._check_range(ask, entry)
            buffer = await self.staging.reserve()
            return await self._transfer(channel, buffer, entry, group, ask)
        except BaseException as error:
            # D's receive is posted and nothing will fill it: only dropping the channel ends it.
            channel.abort(f"transfer {ask.transfer_id} failed: {error}")
            self._channels.drop(ask.nonce)
            raise

    async def _transfer(
        self, channel: Channel, buffer: Buffer, entry: Offered, group: Group, ask: m.Send
    ) -> m.Sent:
        out = staged(group, buffer, ask.hi - ask.lo)
        size = self._caches.pool.page_size
        first, last = ask.lo // size, -(-ask.hi // size)
        try:
            gather = partial(self._gather, entry, group, ask, (first, last), out)
            mark = await self._engine.call(gather)
            await asyncio.wrap_future(channel.send(out, mark).done)
        except BaseException as error:
            channel.abort(f"transfer {ask.transfer_id} failed: {error}")
            self.staging.quarantine(buffer, channel.terminal)
            raise
        self.staging.free(buffer)
        return m.Sent(ask.transfer_id, out.nbytes, first, entry.generations[first:last])

    def _gather(
        self, entry: Offered, group: Group, ask: m.Send, span: tuple[int, int], out: Tensor
    ) -> Fence | None:
        first, last = span
        self._caches.pool.check_generations(entry.pages[first:last], entry.generations[first:last])
        self._caches.gather(group, entry.pages, ask.lo, ask.hi, out)
        return fence(self._caches.device)

    def _check_range(self, ask: m.Send, entry: Offered) -> Group:
        index = self._caches.layout.index(ask.group)
        group = self._caches.layout.groups[index]
        available = entry.num_tokens[index]
        if not 0 <= ask.lo < ask.hi <= available:
            raise HandoverError(f"tokens [{ask.lo}, {ask.hi}) asked for, {available} computed")
        num_bytes = (ask.hi - ask.lo) * group.bytes_per_token_all_layers
        if num_bytes > self._options.chunk_bytes:
            raise HandoverError(f"chunks of {self._options.chunk_bytes} B here, {num_bytes} there")
        return group
