"""P's half of one transfer, and its ends of channels: check, gather into staging, send."""

import asyncio
from functools import partial

from core.errors import HandoverError
from core.tasks import in_thread
from kv_transfer import messages as m
from kv_transfer.base import Channel
from kv_transfer.caches import staged
from kv_transfer.layout import Group
from kv_transfer.offered import Computed, OfferBook
from kv_transfer.side import Side
from kv_transfer.staging import Buffer, Fence, fence


class AcceptedChannels:
    """P's ends of channels, by nonce. At most one per peer: a new one replaces the old. Owned by
    one asyncio loop."""

    def __init__(self, side: Side) -> None:
        self._maker = side.maker
        self._tasks = side.tasks
        self._accepting: dict[str, tuple[str, asyncio.Task[Channel]]] = {}

    def __len__(self) -> int:
        return len(self._accepting)

    async def accept(self, nonce: str, peer: str) -> str:
        """Begin to build P's end, dropping the peer's old one. Returns the address for D."""
        address = await in_thread(self._maker.listen)
        for old in [n for n, (owner, _) in self._accepting.items() if owner == peer]:
            self.drop(old)
        self._accepting[nonce] = (peer, self._tasks.start(self._build(nonce, peer)))
        return address

    async def get(self, nonce: str) -> Channel:
        """The channel, once built. Raises HandoverError if there is none or it failed."""
        if nonce not in self._accepting:
            raise HandoverError(f"no channel {nonce!r} is open here")
        channel = await asyncio.shield(self._accepting[nonce][1])
        if channel.failure is not None:
            raise channel.failure
        return channel

    async def _build(self, nonce: str, peer: str) -> Channel:
        try:
            return await in_thread(partial(self._maker.accept, nonce, peer))
        except BaseException:
            self._accepting.pop(nonce, None)
            raise

    def drop(self, nonce: str) -> None:
        """End a channel; one that is still being built ends when it is."""
        _, building = self._accepting.pop(nonce, ("", None))
        if building is not None:
            self._tasks.start(_end(building))

    def drop_all(self) -> None:
        for nonce in list(self._accepting):
            self.drop(nonce)


async def _end(building: "asyncio.Task[Channel]") -> None:
    await asyncio.wait([building])
    if building.exception() is None:
        channel = building.result()
        channel.abort("dropped")
        await asyncio.wrap_future(channel.terminal)


class Sender:
    """Gathers run on the engine thread, right after the generation check."""

    def __init__(self, side: Side, book: OfferBook) -> None:
        self.channels = AcceptedChannels(side)
        self._caches = side.caches
        self._side = side
        self._book = book

    async def send(self, ask: m.Send) -> m.Sent:
        """Gather one chunk and send it; D's receive is launched already.

        Must run to its end. Raises HandoverError for an identity, range or transfer id that is
        not to be had, StalePages when its pages changed hands; the channel is gone then.
        """
        channel = await self.channels.get(ask.nonce)
        try:
            if ask.transfer_id != channel.num_transfers:
                raise HandoverError(
                    f"transfer {channel.num_transfers} is next here, {ask.transfer_id} there"
                )
            computed = self._book.need(ask.identity).computed
            group = self._check_range(ask, computed)
            buffer = await self._side.staging.reserve()
            return await self._transfer(channel, buffer, computed, group, ask)
        except BaseException as error:
            # D's receive is posted and nothing will fill it: only dropping the channel ends it.
            channel.abort(f"transfer {ask.transfer_id} failed: {error}")
            self.channels.drop(ask.nonce)
            raise

    async def _transfer(
        self, channel: Channel, buffer: Buffer, computed: Computed, group: Group, ask: m.Send
    ) -> m.Sent:
        staging, size = self._side.staging, self._caches.pool.page_size
        out = staged(group, buffer, ask.hi - ask.lo)
        first, last = ask.lo // size, -(-ask.hi // size)
        generations = computed.generations[first:last]

        def gather() -> Fence | None:
            self._caches.pool.check_generations(computed.pages[first:last], generations)
            self._caches.gather(group, computed.pages, ask.lo, ask.hi, out)
            return fence(self._caches.device)

        try:
            mark = await asyncio.wrap_future(self._side.engine.post(gather))
            await asyncio.wrap_future(channel.send(out, mark).done)
        except BaseException as error:
            channel.abort(f"transfer {ask.transfer_id} failed: {error}")
            staging.quarantine(buffer, channel.terminal)
            raise
        staging.free(buffer)
        return m.Sent(ask.transfer_id, out.nbytes, first, generations)

    def _check_range(self, ask: m.Send, computed: Computed) -> Group:
        index = self._caches.layout.index(ask.group)
        group = self._caches.layout.groups[index]
        available = computed.num_tokens[index]
        if not 0 <= ask.lo < ask.hi <= available:
            raise HandoverError(f"tokens [{ask.lo}, {ask.hi}) asked for, {available} computed")
        num_bytes = (ask.hi - ask.lo) * group.bytes_per_token_all_layers
        chunk_bytes = self._side.staging.chunk_bytes
        if num_bytes > chunk_bytes:
            raise HandoverError(f"chunks of {chunk_bytes} B here, {num_bytes} there")
        return group
