"""The prefill side of hand-overs: offers what the engine computes, sends what D asks for."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from core.control import answer
from core.errors import HandoverError
from core.schema import unpack
from core.tasks import Tasks
from kv_transfer import messages as m
from kv_transfer.accepted import AcceptedChannels
from kv_transfer.base import ChannelMaker
from kv_transfer.caches import Caches
from kv_transfer.engine_thread import EngineThread
from kv_transfer.layout import check_same
from kv_transfer.leases import Key
from kv_transfer.messages import check_epoch
from kv_transfer.offered import OfferBook, Offered
from kv_transfer.options import TransferOptions
from kv_transfer.sender import Sender

log = logging.getLogger(__name__)


class Source:
    """One prefill rank's KV, as decode ranks pull it.

    `open`, `advance`, `seal` and `fail` are called on the engine thread and never block. For
    every opened key ``on_release(key)`` is called there exactly once, and only then may the
    engine free the pages; until it comes, calls for a key that has ended are ignored.
    Everything else belongs to the asyncio loop that called `start`.
    """

    def __init__(
        self,
        epoch: str,
        caches: Caches,
        engine: EngineThread,
        maker: ChannelMaker,
        on_release: Callable[[Key], None],
        options: TransferOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self._caches = caches
        self._engine = engine
        self._maker = maker
        self._on_release = on_release
        self._options = options
        self._book = OfferBook(len(caches.layout.groups), options.lease_s, clock)
        self._tasks = Tasks()
        self._channels = AcceptedChannels(maker, self._tasks)
        self._sender = Sender(caches, engine, self._channels, self._book, options, maker.device)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._handlers: dict[str, tuple[type, Callable[[Any], Awaitable[Any]]]] = {
            "connect": (m.Connect, self._connect),
            "pull": (m.Pull, self._pull),
            "send": (m.Send, self._send),
            "renew": (m.Renew, self._renew),
            "release": (m.Release, self._release),
            "hang_up": (m.HangUp, self._hang_up),
        }

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.create_task(self._sweep())

    async def stop(self) -> None:
        """End every key, channel and task; the engine loop must still run."""
        assert self._sweeper is not None, "stop without start"
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        for key in self._book.open_keys():
            self._end(key, "the prefill node is shutting down")
        self._channels.drop_all()
        await self._tasks.finish()

    def open(self, key: Key) -> None:
        """Begin to offer a sequence: its lease starts now."""
        self._post(lambda: None if self._book.open(key) else self._report_release(key))

    def advance(self, key: Key, pages: list[int], num_tokens: tuple[int, ...]) -> None:
        """Tokens ``[0, num_tokens[g])`` of group g are computed; ``pages`` are all so far."""
        most = len(pages) * self._caches.pool.page_size
        assert max(num_tokens) <= most, f"{key}: {num_tokens} tokens on {len(pages)} pages"
        generations = self._caches.pool.generations(pages)
        grown = Offered(key, num_tokens, tuple(pages), generations)
        self._post(lambda: self._book.advance(key, grown))

    def seal(
        self, key: Key, first_token: int, hidden: bytes | None = None, hidden_dtype: str = ""
    ) -> None:
        """The last advance was the last; ``hidden`` None means zero_hidden."""

        def make(entry: Offered) -> m.Seal:
            counts = entry.num_tokens
            return m.Seal(first_token, hidden, hidden_dtype, counts, entry.generations)

        self._post(lambda: self._book.seal(key, make))

    def fail(self, key: Key, text: str) -> None:
        """Prefill gives a key up; D gets a HandoverError with this text."""
        self._post(lambda: self._end(key, text))

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one control call (see `kv_transfer.messages`); failures are answers too."""
        return await answer(lambda: self._dispatch(method, payload), method)

    def counts(self) -> dict[str, int]:
        """What is held right now; all zero after `stop`."""
        return {
            "keys": self._book.num_open,
            "leases": len(self._book.leases),
            "waiting": self._book.num_waiting,
            "channels": len(self._channels),
            "staging": self._sender.staging.num_taken,
            "tasks": len(self._tasks),
        }

    def check_integrity(self) -> None:
        self._sender.staging.check_integrity()
        assert set(self._book.open_keys()) == self._book.leases.keys(), "keys and leases differ"

    async def _dispatch(self, method: str, payload: bytes) -> Any:
        if method not in self._handlers:
            raise HandoverError(f"no method {method!r}, only {list(self._handlers)}")
        schema, handler = self._handlers[method]
        return await handler(unpack(schema, payload))

    async def _connect(self, ask: m.Connect) -> m.Address:
        check_epoch(self.epoch, ask.epoch)
        if ask.backend != self._maker.backend:
            raise HandoverError(f"backend {self._maker.backend!r} here, {ask.backend!r} there")
        check_same(self._caches.layout, ask.layout)
        return m.Address(await self._channels.accept(ask.nonce, ask.peer), self._options.lease_s)

    async def _hang_up(self, ask: m.HangUp) -> m.Ack:
        self._channels.drop(ask.nonce)
        return m.Ack()

    async def _pull(self, ask: m.Pull) -> m.Ready:
        check_epoch(self.epoch, ask.epoch)
        num_groups = len(self._caches.layout.groups)
        if len(ask.num_pulled) != num_groups:
            raise HandoverError(f"{num_groups} groups here, {len(ask.num_pulled)} there")
        entry = await self._book.wait((ask.request_id, ask.attempt), ask.num_pulled, ask.wait_s)
        if entry is None:
            return m.Ready(False, (0,) * num_groups, None)
        return m.Ready(True, entry.num_tokens, entry.seal)

    async def _renew(self, ask: m.Renew) -> m.Ack:
        check_epoch(self.epoch, ask.epoch)
        self._book.renew((ask.request_id, ask.attempt))
        return m.Ack()

    async def _release(self, ask: m.Release) -> m.Ack:
        check_epoch(self.epoch, ask.epoch)
        self._end((ask.request_id, ask.attempt), f"released: {ask.reason}")
        return m.Ack()

    async def _send(self, ask: m.Send) -> m.Sent:
        check_epoch(self.epoch, ask.epoch)
        return await self._tasks.detached(self._sender.send(ask))

    def _end(self, key: Key, reason: str) -> None:
        if self._book.end(key, reason):
            self._report_release(key)

    def _report_release(self, key: Key) -> None:
        self._engine.post(lambda: self._on_release(key)).add_done_callback(_log_failure)

    def _post(self, function: Callable[[], None]) -> None:
        assert self._loop is not None, "the source was not started"
        self._loop.call_soon_threadsafe(function)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._options.lease_s / 4)
            for key in self._book.sweep():
                log.warning("lease of %s expired", key)
                self._report_release(key)


def _log_failure(future: "Future[None]") -> None:
    if future.exception() is not None:
        log.error("on_release failed", exc_info=future.exception())
