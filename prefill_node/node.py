"""One prefill rank as its callers see it: bytes in, bytes out, no Ray.

Lives on an asyncio loop; the engine computes on the engine loop's thread. This object joins the
engine's progress with the hand-over's source: a chunk computed is a chunk offered.
"""

import asyncio
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.control import Methods, Service
from core.errors import HandoverError
from core.identity import Identity
from core.info import NodeStatus
from kv_transfer.base import ChannelMaker
from kv_transfer.side import Side
from kv_transfer.source import Source
from prefill_node.engine import PrefillEngine, Progress
from prefill_node.messages import Cancel, Prefill, Prefilled
from prefill_node.page_source import PageSource
from runtime.parts import RankParts


@dataclass(slots=True, eq=False)
class _Caller:
    """Who waits for a prompt's first token, since when (monotonic seconds)."""

    answer: "asyncio.Future[Prefilled]"
    submitted_at: float = field(default_factory=time.monotonic)


class PrefillNode:
    """A prefill rank; ``parts.loop`` is started by whoever made it, and ``stop`` ends both.

    Owns the callers; pages belong to the engine, leases to the source.
    """

    def __init__(
        self, parts: RankParts, maker: ChannelMaker, pages: PageSource | None = None
    ) -> None:
        config, self.spec = parts.config, parts.spec
        self.loop = parts.loop
        self.engine = PrefillEngine(
            parts.loaded,
            parts.pool,
            parts.caches,
            epoch=parts.spec.epoch,
            max_batch_tokens=config.prefill.max_batch_tokens,
            on_progress=self._on_progress,
            pages=pages,
        )
        caches = parts.transfer_caches()
        self.source = Source(Side(caches, parts.loop, maker, config.kv_transfer))
        self.info = parts.info(caches.layout.fingerprint(), config.speculation.num_tokens)
        self.pool = parts.pool
        self._ship_hidden = config.speculation.first_step == "ship_hidden"
        self._callers: dict[Identity, _Caller] = {}
        self._asyncio = asyncio.get_running_loop()
        parts.loop.on_failure(self._on_engine_failure)
        parts.loop.add(self.engine)
        own: Methods = {
            "prefill": (Prefill, self._prefill),
            "cancel": (Cancel, self._cancel),
            "status": (None, self._status),
        }
        service = Service(parts.spec.name, parts.spec.epoch, {**self.source.methods, **own})
        self.handle = service.handle

    async def stop(self) -> None:
        await self.source.stop()
        await asyncio.to_thread(self.loop.stop)

    def _on_progress(self, progress: Progress) -> None:
        """Offer a computed chunk; with the last one, seal and answer. Engine thread."""
        self.source.advance(progress.identity, list(progress.pages), progress.num_tokens)
        if progress.first_token is None:
            return
        assert progress.hidden_D is not None
        hidden, dtype = self._packed_hidden(progress.hidden_D)
        self.source.seal(progress.identity, progress.first_token, hidden, dtype)
        self._asyncio.call_soon_threadsafe(self._answer, progress)

    def _on_release(self, identity: Identity) -> None:
        """The hand-over needs the pages no more. Engine thread."""
        self.engine.drop(identity)
        text = f"{identity} was released before its prefill was done"
        self._asyncio.call_soon_threadsafe(self._refuse, identity, text)

    def _on_engine_failure(self, error: BaseException) -> None:
        """Nobody waits for an engine that has stopped, pulls neither. Engine thread."""
        text = f"the engine stopped: {error!r}"
        for identity in list(self._callers):
            self._asyncio.call_soon_threadsafe(self._refuse, identity, text)
            self.source.fail(identity, text)

    async def _prefill(self, asked: Prefill) -> Prefilled:
        caller = _Caller(self._asyncio.create_future())
        try:
            await self.loop.call(lambda: self._submit(asked, caller))
            return await caller.answer
        except (asyncio.CancelledError, ValueError) as error:
            self.source.fail(asked.identity, f"its caller has gone or was refused: {error}")
            raise

    def _submit(self, asked: Prefill, caller: _Caller) -> None:
        identity = asked.identity
        self.engine.submit(identity, asked.request)
        self._callers[identity] = caller
        self.source.open(identity, lambda: self._on_release(identity))

    def _answer(self, progress: Progress) -> None:
        caller = self._callers.pop(progress.identity, None)
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

    def _refuse(self, identity: Identity, text: str) -> None:
        caller = self._callers.pop(identity, None)
        if caller is not None and not caller.answer.done():
            caller.answer.set_exception(HandoverError(text))

    def _packed_hidden(self, hidden_D: Tensor) -> tuple[bytes | None, str]:
        if not self._ship_hidden:
            return None, ""
        raw = hidden_D.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return raw, str(hidden_D.dtype).removeprefix("torch.")

    async def _cancel(self, asked: Cancel) -> None:
        self.source.fail(asked.identity, "it was cancelled")

    async def _status(self, _: None) -> NodeStatus:
        scheduler = self.engine.scheduler
        num_rows, num_free = await self.loop.call(
            lambda: (scheduler.num_waiting + scheduler.num_queued, self.pool.num_available)
        )
        counts = self.source.counts()
        return NodeStatus(
            name=self.info.name,
            kind=self.info.kind,
            epoch=self.info.epoch,
            num_active_rows=num_rows,
            num_free_pages=num_free,
            num_pages=self.pool.num_pages,
            num_open_leases=counts["leases"],
            num_channels=counts["channels"],
            num_steps=self.engine.num_steps,
        )
