"""State of one pull on a decode rank: chunks are received into staging and scattered to pages."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.answer import TransferStats
from tandem.core.errors import HandoverError, StalePages
from tandem.kv_transfer import messages as m
from tandem.kv_transfer.caches import Span, staging_view
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.peer_link import PeerLink
from tandem.kv_transfer.staging import Buffer

MAX_CHUNKS_IN_FLIGHT = 4
"""Maximum number of chunks of one pull in flight: one is scattered while others are received.

The limit lets the chunks of concurrent pulls interleave.
"""


@dataclass(slots=True, eq=False)
class PullState:
    """A running pull. A transfer that was started runs to its end, even if the pull is cancelled.

    Attributes:
        link: Connection to the prefill rank.
        pages: Pages of this rank to write the KV into.
        num_pulled: Tokens that are in the pages, the same number in all groups.
        replies: Replies to the requests for the chunks in the pages. They name the page generations
            that were read.
        wire_s: Seconds during which at least one chunk was in flight.
        transfers: Running transfers.
        window: Limits the chunks in flight to MAX_CHUNKS_IN_FLIGHT.
    """

    endpoint: TransferEndpoint
    link: PeerLink
    offer: m.Offer
    pages: Sequence[int]
    num_pulled: int = 0
    replies: list[m.SendReply] = field(default_factory=list)
    wire_s: float = 0.0
    _last_transfer_at: float = 0.0
    transfers: set[asyncio.Task[m.SendReply]] = field(default_factory=set)
    window: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)
    )

    def check(self, ready: m.PullReply) -> None:
        """Raise HandoverError if the prefill rank reports an impossible number of tokens."""
        if not self.num_pulled <= ready.num_tokens <= self.offer.num_tokens:
            raise HandoverError(
                f"{self.offer.identity}: the prefill rank reported {ready.num_tokens} computed "
                f"tokens, expected {self.num_pulled} (pulled so far) to {self.offer.num_tokens} "
                "(offered)"
            )

    def check_seal(self, seal: m.Seal) -> None:
        """Check that the seal covers exactly the pulled tokens and pages.

        Raises:
            HandoverError: The number of pulled tokens differs from the offered one.
            StalePages: The generation of a page changed after it was read.
        """
        identity = self.offer.identity
        offered = self.offer.num_tokens
        if self.num_pulled != offered:
            raise HandoverError(
                f"{identity}: the KV cache was sealed at {self.num_pulled} tokens, but {offered} "
                "were offered"
            )
        for reply in self.replies:
            sealed = seal.generations[reply.first_page : reply.first_page + len(reply.generations)]
            if sealed != reply.generations:
                raise StalePages(
                    f"{identity}: pages from index {reply.first_page} on changed owners: "
                    f"generations were {reply.generations} when sent, {sealed} when sealed"
                )

    def stats(self) -> TransferStats:
        """Return the totals of the pull.

        ``seconds`` is the time during which chunks were in flight, including the prefill rank's
        copies from its pages.
        """
        num_bytes = sum(reply.num_bytes for reply in self.replies)
        backend = self.endpoint.channel_factory.backend
        return TransferStats(
            bytes=num_bytes, tokens=self.offer.num_tokens, backend=backend, seconds=self.wire_s
        )

    async def fetch(self, span: Span) -> None:
        """Pull one chunk into the pages and record the reply to its request.

        If the call is cancelled during the transfer, the chunk is still received into staging and
        then discarded.
        """
        async with self.window:
            buffer = await self.link.reserve_slot()
            transfer = self.endpoint.tasks.start(self._transfer(span, buffer))
            self.transfers.add(transfer)
            transfer.add_done_callback(self.transfers.discard)
            try:
                reply = await asyncio.shield(transfer)
            except asyncio.CancelledError:
                transfer.add_done_callback(lambda done: self._free_unread(done, buffer))
                raise
            try:
                await self._scatter(span, buffer)
            finally:
                self.endpoint.staging.free(buffer)
            self.replies.append(reply)

    async def _transfer(self, span: Span, buffer: Buffer) -> m.SendReply:
        started_at = time.perf_counter()
        reply = await self.link.transfer_chunk(self.offer.identity, span, buffer)
        now = time.perf_counter()
        self.wire_s += now - max(started_at, self._last_transfer_at)
        self._last_transfer_at = now
        return reply

    def _free_unread(self, transfer: "asyncio.Task[m.SendReply]", buffer: Buffer) -> None:
        if not transfer.cancelled() and transfer.exception() is None:
            self.endpoint.staging.free(buffer)

    async def _scatter(self, span: Span, buffer: Buffer) -> None:
        """Copy a chunk from staging into the pages.

        If the call is cancelled, it returns only when no copy is running.

        Raises:
            HandoverError: The copy failed, for instance because device memory ran out.
        """
        posted = self.endpoint.copier.submit(
            self.endpoint.caches.scatter, span, staging_view(span, buffer)
        )
        waiting = asyncio.wrap_future(posted)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not posted.cancel():
                await asyncio.wait([waiting])
            raise
        except Exception as error:
            identity = self.offer.identity
            raise HandoverError(f"{identity}: copying a chunk failed: {error!r}") from error
