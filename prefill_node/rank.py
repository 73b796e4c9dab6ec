"""RPC service of one prefill rank. Messages are bytes; Ray is not needed.

The service runs on an asyncio loop, the engine on the thread of the engine loop. Every chunk that
the engine has computed is offered to decode ranks through the hand-over source.
"""

import asyncio
import time

import torch
from torch import Tensor

from tandem.core.control import Methods, Service
from tandem.core.errors import HandoverError, RankDied, TandemError
from tandem.core.heartbeat import Heartbeat, RankLoad
from tandem.core.identity import Identity
from tandem.core.tasks import resolve
from tandem.kv_transfer.messages import Seal
from tandem.kv_transfer.source import Source
from tandem.net.calls import CALL_ADDRESS, CallServer
from tandem.prefill_node.engine import ChunkResult, PrefillEngine
from tandem.prefill_node.page_source import PageSource
from tandem.prefill_node.prefill_calls import Prefill, PrefillReply
from tandem.runtime.computed_rows import ComputedRows
from tandem.runtime.parts import RankParts


class PrefillRank:
    """RPC service of a prefill rank. The creator must start ``parts.loop``.

    Owns the pending calls. Pages belong to the engine, leases to the source. ``stop`` ends the
    service and the loop.
    """

    def __init__(self, parts: RankParts, pages: PageSource | None = None) -> None:
        self.spec = parts.spec
        self.pool = parts.pool
        self.loop = parts.loop
        self.engine = PrefillEngine(
            parts=parts, on_progress=self._on_progress, on_failed=self._on_failed, pages=pages
        )
        self.source = Source(parts.transfer_endpoint())
        self.info = parts.info()
        self._handover_hidden = parts.config.speculation.handover_hidden
        self._counters = parts.counters
        self._kernels = parts.loaded.kernels.name
        self._rows = ComputedRows(parts.loop, parts.loaded.dispatch)
        self._callers: dict[Identity, asyncio.Future[ChunkResult]] = {}
        self._asyncio = asyncio.get_running_loop()
        parts.loop.on_failure(self._on_engine_failure)
        parts.loop.add(self.engine)
        methods: Methods = {
            "prefill": (Prefill, self._prefill),
            "cancel": (
                Identity,
                lambda identity: self.source.fail(identity, "its prefill was cancelled"),
            ),
            "heartbeat": (None, self._heartbeat),
            "ping": (None, lambda _: self.loop.call(lambda: None)),
            CALL_ADDRESS: (None, lambda _: self._server.listen()),
        }
        service = Service(
            parts.spec.epoch_name, parts.spec.epoch, {**self.source.methods, **methods}
        )
        self.handle = service.handle
        self._server = CallServer(parts.spec.host, self.handle)

    @property
    def num_sequences(self) -> int:
        return len(self.engine.scheduler.sequences)

    async def listen(self) -> None:
        """Start to serve calls that decode ranks make over direct connections."""
        await self._server.listen()

    async def stop(self) -> None:
        await self.source.stop()
        await self._server.stop()
        await asyncio.to_thread(self.loop.stop)

    def _on_progress(self, progress: ChunkResult) -> None:
        """Offer a computed chunk. After the last one, seal the hand-over and complete the call.

        Called on the engine thread.
        """
        sequence = progress.sequence
        seal = None
        if progress.first_token is not None:
            seal = Seal(progress.first_token, *self._pack_features(progress.features_F))
        self.source.advance(
            identity=sequence.identity,
            pages=sequence.pages,
            num_tokens=sequence.num_computed,
            seal=seal,
        )
        if seal is not None:
            self._answer(sequence.identity, progress)

    def _on_release(self, identity: Identity) -> None:
        """Drop a sequence whose hand-over has ended. Called on the engine thread."""
        self.engine.scheduler.drop(identity)
        text = f"{identity}: its pages were released before its prefill ended"
        self._answer(identity, HandoverError(text))

    def _on_failed(self, identity: Identity, error: TandemError) -> None:
        """Report a failed prefill to the calling gateway, then to the decode rank.

        Called on the engine thread.
        """
        self._answer(identity, error)
        self.source.fail(identity, str(error))

    def _on_engine_failure(self, error: BaseException) -> None:
        """Fail all pending calls and pulls: the engine has stopped. Called on the engine thread."""
        text = f"the engine stopped: {error!r}"
        for identity in list(self._callers):
            self._answer(identity, RankDied(text))
            self.source.fail(identity, text)

    def _answer(self, identity: Identity, result: ChunkResult | TandemError) -> None:
        """Complete the pending call of ``identity``, if any. Called on the engine thread."""
        answer = self._callers.pop(identity, None)
        if answer is not None:
            self._asyncio.call_soon_threadsafe(resolve, answer, result)

    async def _prefill(self, prefill: Prefill) -> PrefillReply:
        answer: asyncio.Future[ChunkResult] = self._asyncio.create_future()
        submitted_at = time.monotonic()
        try:
            await self.loop.call(lambda: self._submit(prefill, answer))
            done = await answer
        except (asyncio.CancelledError, ValueError) as error:
            self.source.fail(
                prefill.identity, f"its prefill call was cancelled or refused: {error}"
            )
            raise
        assert done.first_token is not None
        started_at = done.sequence.started_at
        return PrefillReply(
            done.first_token,
            done.sequence.num_cached,
            queue_ms=(started_at - submitted_at) * 1e3,
            prefill_ms=(time.monotonic() - started_at) * 1e3,
            logprobs=done.logprobs,
        )

    def _submit(self, prefill: Prefill, answer: "asyncio.Future[ChunkResult]") -> None:
        identity = prefill.identity
        self.engine.scheduler.admit(identity, prefill.request, prefill.is_suspect)
        self._callers[identity] = answer
        self.source.open(identity, lambda: self._on_release(identity))

    def _pack_features(self, features_F: Tensor | None) -> tuple[bytes | None, str]:
        if features_F is None or not self._handover_hidden:
            return None, ""
        raw = features_F.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return raw, str(features_F.dtype).removeprefix("torch.")

    def _heartbeat(self, _: None) -> Heartbeat:
        """Build a heartbeat with the engine thread's progress. Does not wait for that thread."""
        if self.loop.failure is not None:
            raise RankDied(f"the engine stopped: {self.loop.failure!r}")
        num_left = self.engine.scheduler.num_tokens_left
        return Heartbeat(
            self.loop.stall_detector.measure_progress(), self._load(), num_tokens_left=num_left
        )

    def _load(self) -> RankLoad:
        scheduler = self.engine.scheduler
        counts = self.source.counts()
        return RankLoad(
            num_active_rows=scheduler.num_waiting + scheduler.num_queued,
            num_free_tokens=self.pool.num_free_tokens,
            num_open_leases=counts["leases"],
            num_channels=counts["channels"],
            num_quarantined=counts["quarantined"],
            counters={"num_steps": float(self.engine.num_steps)} | self._counters,
            kernels=self._kernels,
            rows_by_layer=self._rows.latest(),
        )


async def build(parts: RankParts) -> PrefillRank:
    """Create a prefill rank that serves direct connections from decode ranks.

    Raises ValueError if the rank cannot listen on its address.
    """
    rank = PrefillRank(parts)
    await rank.listen()
    return rank
