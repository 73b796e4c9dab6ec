"""The prefill side of hand-overs: offers what the engine computes, sends what D asks for."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from tandem.core.control import Methods
from tandem.core.errors import HandoverError
from tandem.core.identity import Identity
from tandem.core.tasks import again, cancelled
from tandem.kv_transfer import messages as m
from tandem.kv_transfer.accepted import AcceptedChannels
from tandem.kv_transfer.base import Channel, Transfer
from tandem.kv_transfer.caches import Span, staged
from tandem.kv_transfer.layout import check_given
from tandem.kv_transfer.offered import Computed, OfferBook
from tandem.kv_transfer.side import Side
from tandem.kv_transfer.staging import Buffer
from tandem.kv_transfer.sums import PageSums
from tandem.kv_transfer.waiting import settled

log = logging.getLogger(__name__)


class Source:
    """One prefill rank's KV, as decode ranks pull it. Made inside a running asyncio loop.

    `open`, `advance` and `fail` are called on the engine thread and never block; calls
    for what has ended are ignored. Everything else belongs to the asyncio loop.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._layout = side.caches.layout
        loop = asyncio.get_running_loop()
        self._book = OfferBook(side.config.lease_s, loop.time)
        self._channels, self._sums = AcceptedChannels(side), PageSums(side.caches)
        self._post = loop.call_soon_threadsafe
        every_s = min(self._book.lease_s, side.deadlines.idle_s) / 4
        self._sweeper = asyncio.create_task(again(every_s, self._sweep))
        self.methods: Methods = {
            "connect": (m.Connect, self._connect),
            "pull": (m.Pull, self._pull),
            "send": (m.Send, lambda ask: side.tasks.detached(self._send(ask))),
            "sums": (Identity, self._sum_up),
            "renew": (Identity, self._book.renew),
            "release": (m.Release, lambda ask: self._end(ask.identity, f"released: {ask.reason}")),
            "hang_up": (m.HangUp, lambda ask: self._channels.drop(ask.nonce, "hung up")),
        }

    async def stop(self) -> None:
        """End every offer, channel and task; the engine loop must still run."""
        await cancelled(self._sweeper)
        for identity in self._book.open_ones():
            self._end(identity, "the prefill node is shutting down")
        self._channels.drop_all()
        await self._side.close()

    async def idle(self) -> None:
        """Wait for what calls left behind."""
        await self._side.tasks.finish()

    def open(self, identity: Identity, on_release: Callable[[], None]) -> None:
        """Begin to offer a sequence: its lease starts now.

        ``on_release`` is called on the engine thread exactly once, whatever happens, and only
        then may the engine free the pages.
        """
        self._post(self._open, identity, on_release)

    def advance(
        self, identity: Identity, pages: list[int], num_tokens: int, seal: m.Seal | None = None
    ) -> None:
        """Tokens ``[0, num_tokens)`` are computed; ``pages`` are all so far. What comes with a
        ``seal`` is the last: D is told of both at once."""
        caches, pool = self._side.caches, self._side.caches.pool
        most = len(pages) * pool.page_size
        assert num_tokens <= most, f"{identity}: {num_tokens} tokens on {len(pages)} pages"
        now = Computed(num_tokens, tuple(pages), pool.generations(pages), caches.mark())
        self._post(self._book.advance, identity, now, seal)

    def fail(self, identity: Identity, text: str) -> None:
        """Prefill gives a sequence up; D gets a HandoverError with this text."""
        self._post(self._end, identity, text)

    def counts(self) -> dict[str, int]:
        """What is held right now; all zero after `stop`. An offer is a lease."""
        return {
            "leases": len(self._book.open_ones()),
            "waiting": self._book.num_waiting,
            "channels": len(self._channels),
            "staging": self._side.staging.num_taken,
            "quarantined": self._side.staging.num_quarantined(),
            "tasks": len(self._side.tasks),
        }

    async def _connect(self, ask: m.Connect) -> m.Accepted:
        backend = self._side.maker.backend
        if ask.backend != backend:
            raise HandoverError(f"backend {backend!r} here, {ask.backend!r} there")
        check_given(self._layout.facts(), ask.caches)
        address = await self._channels.accept(ask)
        return m.Accepted(address, self._book.lease_s)

    async def _pull(self, ask: m.Pull) -> m.Ready:
        entry = await self._book.wait(ask.identity, ask.num_pulled, ask.wait_s)
        if entry is None:
            return m.Ready(False, 0, None)
        return m.Ready(True, entry.computed.num_tokens, entry.seal)

    async def _sum_up(self, identity: Identity) -> m.Sums:
        summing = self._side.copier.submit(self._sums.of, self._book.need(identity).computed)
        return await asyncio.wrap_future(summing)

    async def _send(self, ask: m.Send) -> m.Sent:
        """Read what is asked for and begin to send it. Must run to its end.

        Raises SequenceEnded for an identity and StalePages for pages that are not to be had, of
        which nothing is sent; HandoverError for a range or channel.
        """
        channel = await self._channels.get(ask.nonce)
        # One may overtake another, but not so many. Who comes twice is not waited for by D.
        if ask.number in channel.asked or ask.number < channel.asked[0]:
            raise HandoverError(f"chunk {ask.number} has been asked for already")
        channel.asked.append(ask.number)
        span, buffer = self._span(ask), await self._side.staging.reserve(channel.timeout_s)
        try:
            data = staged(span, buffer)
            first_page, generations = await self._read(ask, span, data)
        except BaseException:
            self._side.staging.free(buffer)
            raise
        transfer = channel.send(data)
        self._side.tasks.start(self._finish(channel, transfer, buffer, ask.nonce))
        return m.Sent(transfer.transfer_id, data.nbytes, first_page, generations)

    async def _finish(
        self, channel: Channel, transfer: Transfer, buffer: Buffer, nonce: str
    ) -> None:
        """What is raised ends the channel, and only then is the buffer free."""
        try:
            await settled(transfer.done, channel)
        except BaseException as error:
            self._side.staging.quarantine(buffer, channel.terminal)
            channel.abort(f"{transfer.what} failed: {error}")
            self._channels.drop(nonce, "it failed")
            raise
        self._side.staging.free(buffer)

    def _span(self, ask: m.Send) -> Span:
        """What is asked for, of which there is so much."""
        group, computed = self._layout.group(ask.group), self._book.need(ask.identity).computed
        if not 0 <= ask.lo < ask.hi <= computed.num_tokens:
            raise HandoverError(
                f"tokens [{ask.lo}, {ask.hi}) asked for, {computed.num_tokens} computed"
            )
        num_bytes = (ask.hi - ask.lo) * group.bytes_per_token_all_layers
        chunk_bytes = self._side.staging.chunk_bytes
        if num_bytes > chunk_bytes:
            raise HandoverError(f"chunks of {chunk_bytes} B here, {num_bytes} there")
        return Span(group, computed.pages, ask.lo, ask.hi)

    async def _read(self, ask: m.Send, span: Span, out: Tensor) -> tuple[int, tuple[int, ...]]:
        """Beside the steps of prefill, which write other entries; what was read is good if its
        pages have not changed hands by then."""
        caches, computed = self._side.caches, self._book.need(ask.identity).computed
        size = caches.pool.page_size
        first, last = ask.lo // size, -(-ask.hi // size)
        reading = self._side.copier.submit(caches.gather, span, out, computed.mark)
        await asyncio.wrap_future(reading)
        self._book.need(ask.identity)
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
        self._side.engine.post(on_release).add_done_callback(_log_failure)

    async def _sweep(self) -> None:
        self._side.check_staging()
        for identity, entry in self._book.sweep().items():
            log.warning("lease of %s expired", identity)
            self._call_on_engine(entry.on_release)
        # D drops an idle channel first; what is left longer belongs to a dead one.
        self._channels.sweep(2 * self._side.deadlines.idle_s)


def _log_failure(future: "Future[None]") -> None:
    if future.exception() is not None:
        log.error("on_release failed", exc_info=future.exception())
