"""One pull: its half of transfers (receive, scatter), and what it has received."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from core.answer import TransferStats
from core.errors import HandoverError, StalePages
from kv_transfer import messages as m
from kv_transfer.base import Channel
from kv_transfer.caches import Span, staged
from kv_transfer.line import Line
from kv_transfer.links import Link
from kv_transfer.side import Side
from kv_transfer.staging import Buffer
from kv_transfer.waiting import SLACK_S, settled

MAX_CHUNKS_IN_FLIGHT = 2
"""Per pull: one on the wire while another is scattered; others get their turn between."""


@dataclass(slots=True, eq=False)
class Pulling:
    """One pull under way: where from, into which pages, and its transfers on the wire; one that was
    started always runs to its end, even when nobody waits.

    ``num_pulled`` tokens of all groups have come and were scattered: ``read`` says as what.
    ``wire_s`` is the time from their receives to their arrivals.
    """

    side: Side
    link: Link
    offer: m.Offer
    pages: Sequence[int]
    num_pulled: int = 0
    read: list[m.Sent] = field(default_factory=list)
    wire_s: float = 0.0
    exchanges: set[asyncio.Task[m.Sent]] = field(default_factory=set)
    window: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)
    )

    def check(self, ready: m.Ready) -> None:
        """Raises HandoverError for counts that cannot be."""
        if not self.num_pulled <= ready.num_tokens <= self.offer.num_tokens:
            raise HandoverError(
                f"{self.offer.identity}: {ready.num_tokens} tokens reported after "
                f"{self.num_pulled}, {self.offer.num_tokens} were offered"
            )

    def check_seal(self, seal: m.Seal) -> None:
        """Raises HandoverError for other counts, StalePages for other pages."""
        identity, offered = self.offer.identity, self.offer.num_tokens
        if self.num_pulled != offered:
            raise HandoverError(
                f"{identity}: sealed at {self.num_pulled} tokens, {offered} were offered"
            )
        for read in self.read:
            sealed = seal.generations[read.first_page : read.first_page + len(read.generations)]
            if sealed != read.generations:
                raise StalePages(
                    f"{identity}: pages from {read.first_page} on were sent at generations "
                    f"{read.generations} and sealed at {sealed}"
                )

    def stats(self) -> TransferStats:
        """The seconds are those that chunks took, from P's reading to their arrival."""
        num_bytes, backend = sum(read.num_bytes for read in self.read), self.side.maker.backend
        return TransferStats(num_bytes, self.offer.num_tokens, backend, self.wire_s)

    async def fetch(self, span: Span) -> None:
        """Bring a chunk of tokens into the pages and note it.

        Cancelled while on the wire, the transfer drains into staging and is not scattered.
        """
        async with self.window:
            exchange, buffer = await self._start(span)
            try:
                sent = await asyncio.shield(exchange)
            except asyncio.CancelledError:
                exchange.add_done_callback(lambda done: self._free_unread(done, buffer))
                raise
            try:
                await self._scatter(span, buffer)
            finally:
                self.side.staging.free(buffer)
            self.read.append(sent)

    async def _start(self, span: Span) -> tuple[asyncio.Task[m.Sent], Buffer]:
        link = self.link
        await link.lock.acquire()
        try:
            line, channel = await link.ready()
            buffer = await self.side.staging.reserve(self.side.deadlines.staging_s)
        except BaseException:
            link.lock.release()
            raise
        where = span.group.name, span.lo, span.hi
        ask = m.Send(self.offer.identity, *where, line.nonce, channel.num_transfers)
        data = staged(span, buffer).flatten()
        exchange = self.side.tasks.start(self._exchange(line, channel, buffer, ask, data))
        self.exchanges.add(exchange)
        exchange.add_done_callback(self.exchanges.discard)
        return exchange, buffer

    async def _exchange(
        self, line: Line, channel: Channel, buffer: Buffer, ask: m.Send, data: Tensor
    ) -> m.Sent:
        """Runs to its end holding the link's lock; quarantines the buffer when it fails."""
        began, link, tasks = time.perf_counter(), self.link, self.side.tasks
        try:
            transfer = channel.recv(data)
            assert transfer.transfer_id == ask.transfer_id, "a channel was used without its lock"
            await settled(transfer.launched, channel)
            call = tasks.start(link.call("send", ask, m.Sent, channel.timeout_s))
            sent = await _arrival(call, tasks.start(settled(transfer.done, channel)))
            if (sent.transfer_id, sent.num_bytes) != (ask.transfer_id, data.nbytes):
                raise HandoverError(f"asked for {ask} of {data.nbytes} B, got {sent}")
        except BaseException as error:
            channel.abort(f"transfer {ask.transfer_id} failed: {error}")
            line.drop("it failed")
            self.side.staging.quarantine(buffer, channel.terminal)
            raise
        finally:
            link.lock.release()
        self.wire_s += time.perf_counter() - began
        return sent

    def _free_unread(self, exchange: "asyncio.Task[m.Sent]", buffer: Buffer) -> None:
        if not exchange.cancelled() and exchange.exception() is None:
            self.side.staging.free(buffer)

    async def _scatter(self, span: Span, buffer: Buffer) -> None:
        posted = self.side.copier.submit(self.side.caches.scatter, span, staged(span, buffer))
        waiting = asyncio.wrap_future(posted)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not posted.cancel():
                await asyncio.wait([waiting])
            raise


async def _arrival(call: "asyncio.Task[m.Sent]", done: "asyncio.Task[None]") -> m.Sent:
    """P's answer, once the bytes are here too. P's own error goes before that of the wire."""
    both: list[asyncio.Task[Any]] = [call, done]
    await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
    if not call.done():
        await asyncio.wait([call], timeout=SLACK_S)
    if call.done():
        call.result()
    await done
    return await call
