"""Prefill side of KV hand-overs: offers the KV of the engine and sends it to decode ranks."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from tandem.core.control import Methods
from tandem.core.errors import HandoverError
from tandem.core.identity import Identity
from tandem.core.tasks import cancel_and_wait, run_periodically
from tandem.kv_transfer import messages as m
from tandem.kv_transfer.accepted_channels import AcceptedChannels
from tandem.kv_transfer.base import Channel, Transfer
from tandem.kv_transfer.caches import Span, staging_view
from tandem.kv_transfer.checksums import PageChecksums
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.layout import check_compatible
from tandem.kv_transfer.offer_book import ComputedTokens, OfferBook
from tandem.kv_transfer.staging import Buffer
from tandem.kv_transfer.waiting import wait_for_transfer

log = logging.getLogger(__name__)


class Source:
    """Serves the KV of one prefill rank to decode ranks. Must be created in a running asyncio loop.

    ``open``, ``advance`` and ``fail`` are called on the engine thread and never block. They have no
    effect on sequences that have ended. All other methods must be called on the asyncio loop.
    """

    def __init__(self, endpoint: TransferEndpoint) -> None:
        self._endpoint = endpoint
        self._layout = endpoint.caches.layout
        loop = asyncio.get_running_loop()
        self._book = OfferBook(endpoint.config.lease_s, loop.time)
        self._channels = AcceptedChannels(endpoint)
        self._checksums = PageChecksums(endpoint.caches)
        self._post = loop.call_soon_threadsafe
        every_s = min(self._book.lease_s, endpoint.deadlines.idle_s) / 4
        self._sweeper = asyncio.create_task(run_periodically(every_s, self._sweep))
        self.methods: Methods = {
            "connect": (m.Connect, self._connect),
            "pull": (m.Pull, self._pull),
            "send": (m.Send, lambda message: endpoint.tasks.run_detached(self._send(message))),
            "checksums": (Identity, self._compute_checksums),
            "renew": (Identity, self._book.renew),
            "release": (
                m.Release,
                lambda message: self._end(
                    message.identity, f"released by the decode rank: {message.reason}"
                ),
            ),
            "close_channel": (
                m.CloseChannel,
                lambda message: self._channels.drop(message.nonce, "closed by the decode rank"),
            ),
        }

    async def stop(self) -> None:
        """End all offers, channels and tasks. The engine loop must still be running."""
        await cancel_and_wait(self._sweeper)
        for identity in self._book.open_identities():
            self._end(identity, "the prefill rank is shutting down")
        self._channels.drop_all()
        await self._endpoint.close()

    async def idle(self) -> None:
        """Wait until the background tasks of earlier calls have ended."""
        await self._endpoint.tasks.finish()

    def open(self, identity: Identity, on_release: Callable[[], None]) -> None:
        """Offer a sequence and start its lease.

        ``on_release`` is called exactly once, on the engine thread, however the offer ends. The
        engine must not free the pages before that call.
        """
        self._post(self._open, identity, on_release)

    def advance(
        self, identity: Identity, pages: list[int], num_tokens: int, seal: m.Seal | None = None
    ) -> None:
        """Announce that tokens ``[0, num_tokens)`` are computed.

        Args:
            identity: The sequence.
            pages: All of its pages so far.
            num_tokens: Number of computed tokens.
            seal: Given with the last tokens; the decode rank receives both in one reply.
        """
        caches = self._endpoint.caches
        pool = self._endpoint.caches.pool
        most = len(pages) * pool.page_size
        assert num_tokens <= most, (
            f"{identity}: {num_tokens} tokens do not fit into {len(pages)} pages"
        )
        now = ComputedTokens(
            num_tokens=num_tokens,
            pages=tuple(pages),
            generations=pool.generations(pages),
            event=caches.record_event(),
        )
        self._post(self._book.advance, identity, now, seal)

    def fail(self, identity: Identity, text: str) -> None:
        """End the offer of a failed prefill. The decode rank gets a HandoverError with ``text``."""
        self._post(self._end, identity, text)

    def counts(self) -> dict[str, int]:
        """Return the number of resources held, by kind; all are 0 after ``stop``.

        "leases" is the number of open offers.
        """
        return {
            "leases": len(self._book.open_identities()),
            "waiting": self._book.num_waiting,
            "channels": len(self._channels),
            "staging": self._endpoint.staging.num_taken,
            "quarantined": self._endpoint.staging.num_quarantined(),
            "tasks": len(self._endpoint.tasks),
        }

    async def _connect(self, message: m.Connect) -> m.ConnectReply:
        backend = self._endpoint.channel_factory.backend
        if message.backend != backend:
            raise HandoverError(
                f"kv_transfer.backend differs: {backend!r} on the prefill rank, "
                f"{message.backend!r} on the decode rank; use the same for both"
            )
        check_compatible(self._layout.compatibility_facts(), message.caches)
        address = await self._channels.accept(message)
        return m.ConnectReply(address, self._book.lease_s)

    async def _pull(self, message: m.Pull) -> m.PullReply:
        entry = await self._book.wait(message.identity, message.num_pulled, message.wait_s)
        if entry is None:
            return m.PullReply(False, 0, None)
        return m.PullReply(True, entry.computed.num_tokens, entry.seal)

    async def _compute_checksums(self, identity: Identity) -> m.Checksums:
        computing = self._endpoint.copier.submit(
            self._checksums.of, self._book.get_open(identity).computed
        )
        return await asyncio.wrap_future(computing)

    async def _send(self, message: m.Send) -> m.SendReply:
        """Copy a chunk into staging and queue its transfer. If this raises, nothing is sent.

        The call must not be cancelled.

        Raises:
            SequenceEnded: The sequence is not offered, or no longer offered.
            StalePages: A page was freed before or while it was read.
            HandoverError: The channel, the range of tokens or the number of the chunk is invalid.
        """
        channel = await self._channels.get(message.nonce)
        # Requests may arrive out of order, within the length of the deque. The decode rank receives
        # each chunk once, so a repeated request must not send it again.
        if (
            message.number in channel.requested_chunks
            or message.number < channel.requested_chunks[0]
        ):
            raise HandoverError(f"{message.identity}: chunk {message.number} was already requested")
        channel.requested_chunks.append(message.number)
        span = self._span(message)
        buffer = await self._endpoint.staging.reserve(channel.timeout_s)
        try:
            data = staging_view(span, buffer)
            first_page, generations = await self._read(message, span, data)
        except BaseException:
            self._endpoint.staging.free(buffer)
            raise
        transfer = channel.send(data)
        self._endpoint.tasks.start(
            self._finish(channel=channel, transfer=transfer, buffer=buffer, nonce=message.nonce)
        )
        return m.SendReply(
            transfer_id=transfer.transfer_id,
            num_bytes=data.nbytes,
            first_page=first_page,
            generations=generations,
        )

    async def _finish(
        self, channel: Channel, transfer: Transfer, buffer: Buffer, nonce: str
    ) -> None:
        """Wait for a transfer and free its buffer.

        An error ends the channel and quarantines the buffer until the channel is terminal.
        """
        try:
            await wait_for_transfer(transfer.done, channel)
        except BaseException as error:
            self._endpoint.staging.quarantine(buffer, channel.terminal)
            channel.abort(f"{transfer.description} failed: {error}")
            self._channels.drop(nonce, "a transfer failed")
            raise
        self._endpoint.staging.free(buffer)

    def _span(self, message: m.Send) -> Span:
        """Return the requested span.

        Raises HandoverError if the tokens are not computed yet or exceed a staging buffer.
        """
        group = self._layout.group(message.group)
        computed = self._book.get_open(message.identity).computed
        if not 0 <= message.lo < message.hi <= computed.num_tokens:
            raise HandoverError(
                f"{message.identity}: tokens [{message.lo}, {message.hi}) were requested, "
                f"but {computed.num_tokens} are computed"
            )
        num_bytes = (message.hi - message.lo) * group.bytes_per_token_all_layers
        chunk_bytes = self._endpoint.staging.chunk_bytes
        if num_bytes > chunk_bytes:
            raise HandoverError(
                f"{message.identity}: a chunk of {num_bytes} B was requested, but the maximum is "
                f"{chunk_bytes} B"
            )
        return Span(group=group, pages=computed.pages, lo=message.lo, hi=message.hi)

    async def _read(self, message: m.Send, span: Span, out: Tensor) -> tuple[int, tuple[int, ...]]:
        """Copy a span into ``out``; return its first page index and its pages' generations.

        Runs in parallel with prefill steps, which write other entries. The copy is valid if no page
        was freed before it was complete, so generations are checked afterwards.
        """
        caches = self._endpoint.caches
        computed = self._book.get_open(message.identity).computed
        size = caches.pool.page_size
        first, last = message.lo // size, -(-message.hi // size)
        reading = self._endpoint.copier.submit(caches.gather, span, out, computed.event)
        await asyncio.wrap_future(reading)
        self._book.get_open(message.identity)
        generations = computed.generations[first:last]
        caches.pool.check_generations(computed.pages[first:last], generations)
        return first, generations

    def _open(self, identity: Identity, on_release: Callable[[], None]) -> None:
        if not self._book.open(identity, on_release):
            self._call_on_engine(on_release)

    def _end(self, identity: Identity, reason: str) -> None:
        entry = self._book.end(identity, reason)
        if entry is not None:
            self._call_on_engine(entry.on_release)

    def _call_on_engine(self, on_release: Callable[[], None]) -> None:
        self._endpoint.engine.post(on_release).add_done_callback(_log_failure)

    async def _sweep(self) -> None:
        self._endpoint.check_staging()
        for identity, entry in self._book.sweep().items():
            log.warning("the lease of %s expired", identity)
            self._call_on_engine(entry.on_release)
        # A live decode rank drops an idle channel earlier, so an older one has a dead peer.
        self._channels.sweep(2 * self._endpoint.deadlines.idle_s)


def _log_failure(future: "Future[None]") -> None:
    if future.exception() is not None:
        log.error("releasing the pages of an offer failed", exc_info=future.exception())
