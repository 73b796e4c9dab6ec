"""One prefill rank as its callers see it: bytes in, bytes out, no Ray.

Lives on an asyncio loop; the engine computes on the engine loop's thread. This object joins the
engine's progress with the hand-over's source: a chunk computed is a chunk offered.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.errors import HandoverError
from core.info import PREFILL, NodeStatus
from core.request import Request
from core.schema import encode_failure, pack, unpack
from kv_transfer.pages import PagePool
from kv_transfer.source import Source
from prefill_node.engine import PrefillEngine, Progress
from prefill_node.messages import Cancel, Done, Prefill, Prefilled
from prefill_node.scheduler import Key
from runtime.engine_loop import EngineLoop

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Caller:
    """Who waits for a prompt's first token, since when (monotonic seconds)."""

    answer: "asyncio.Future[Prefilled]"
    submitted_at: float = field(default_factory=time.monotonic)


class PrefillNode:
    """Owns the callers; pages belong to the engine, leases to the source.

    ``source`` is set once, before the first call: source and node know each other.
    """

    source: Source

    def __init__(
        self,
        name: str,
        epoch: int,
        pool: PagePool,
        loop: EngineLoop,
        engine: PrefillEngine,
        *,
        ship_hidden: bool,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self._pool = pool
        self._loop = loop
        self._engine = engine
        self._ship_hidden = ship_hidden
        self._callers: dict[Key, _Caller] = {}
        self._asyncio = asyncio.get_running_loop()
        loop.on_failure(self._on_engine_failure)
        self._handlers: dict[str, Callable[[bytes], Awaitable[bytes]]] = {
            "prefill": self._prefill,
            "cancel": self._cancel,
            "status": self._status,
        }

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one control call, the hand-over's too; a failed one by a packed Failure."""
        if method not in self._handlers:
            return await self.source.handle(method, payload)
        try:
            return await self._handlers[method](payload)
        except Exception as error:
            log.info("%s: %s failed: %s", self.name, method, error)
            return encode_failure(error)

    def on_progress(self, progress: Progress) -> None:
        """Offer a computed chunk; with the last one, seal and answer. Engine thread."""
        counts = tuple(progress.num_tokens)
        self.source.advance(progress.key, list(progress.pages), counts)
        if progress.first_token is None:
            return
        assert progress.hidden_D is not None
        hidden, dtype = self._packed_hidden(progress.hidden_D)
        self.source.seal(progress.key, progress.first_token, hidden, dtype)
        self._asyncio.call_soon_threadsafe(self._answer, progress)

    def on_release(self, key: Key) -> None:
        """The hand-over needs the pages no more. Engine thread."""
        self._engine.drop(key)
        text = f"{key} was released before its prefill was done"
        self._asyncio.call_soon_threadsafe(self._refuse, key, text)

    def _on_engine_failure(self, error: BaseException) -> None:
        """Nobody waits for an engine that has stopped. Engine thread."""
        for key in list(self._callers):
            self._asyncio.call_soon_threadsafe(self._refuse, key, f"the engine stopped: {error!r}")

    async def _prefill(self, payload: bytes) -> bytes:
        asked = unpack(Prefill, payload)
        key = (asked.request.request_id, asked.attempt)
        if key in self._callers:
            raise ValueError(f"request_id: {key} is already here; use another request_id")
        self._callers[key] = caller = _Caller(self._asyncio.create_future())
        try:
            await self._loop.call(lambda: self._submit(key, asked.request))
            return pack(await caller.answer)
        except asyncio.CancelledError:
            self.source.fail(key, f"the caller of {key} has gone")
            raise
        finally:
            del self._callers[key]

    def _submit(self, key: Key, request: Request) -> None:
        self._engine.submit(request, key[1])
        self.source.open(key)

    def _answer(self, progress: Progress) -> None:
        caller = self._callers.get(progress.key)
        if caller is not None and not caller.answer.done():
            assert progress.first_token is not None
            prefilled = Prefilled(
                progress.first_token,
                progress.num_cached,
                queue_ms=(progress.started_at - caller.submitted_at) * 1e3,
                prefill_ms=(time.monotonic() - progress.started_at) * 1e3,
                logprobs=progress.logprobs,
            )
            caller.answer.set_result(prefilled)

    def _refuse(self, key: Key, text: str) -> None:
        caller = self._callers.get(key)
        if caller is not None and not caller.answer.done():
            caller.answer.set_exception(HandoverError(text))

    def _packed_hidden(self, hidden_D: Tensor) -> tuple[bytes | None, str]:
        if not self._ship_hidden:
            return None, ""
        raw = hidden_D.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return raw, str(hidden_D.dtype).removeprefix("torch.")

    async def _cancel(self, payload: bytes) -> bytes:
        asked = unpack(Cancel, payload)
        key = (asked.request_id, asked.attempt)
        self.source.fail(key, f"{key} was cancelled")
        return pack(Done())

    async def _status(self, payload: bytes) -> bytes:
        num_waiting, num_free = await self._loop.call(
            lambda: (self._engine.scheduler.num_waiting, self._pool.num_available)
        )
        counts = self.source.counts()
        status = NodeStatus(
            name=self.name,
            kind=PREFILL,
            epoch=self.epoch,
            num_active_rows=num_waiting,
            num_free_pages=num_free,
            num_pages=self._pool.num_pages,
            num_open_leases=counts["leases"],
            num_channels=counts["channels"],
            num_steps=self._engine.num_steps,
        )
        return pack(status)
