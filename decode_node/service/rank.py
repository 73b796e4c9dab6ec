"""RPC service of one decode rank. Messages are bytes; Ray is not needed.

The service runs on an asyncio loop, the engine on the engine loop's thread. A sequence passes
through grant -> start (pull) -> activate -> frames. ``abort`` ends it in any phase, and so does the
end of its gateway's session.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from tandem.core.answer import TransferStats
from tandem.core.control import Control, Methods, Service
from tandem.core.errors import HandoverError, RankDied, StepFailed, TandemError
from tandem.core.expiring_map import ExpiringMap
from tandem.core.heartbeat import Heartbeat, RankLoad
from tandem.core.identity import Identity
from tandem.core.tasks import cancel_and_wait, resolve, run_periodically
from tandem.decode_node.engine import DecodeEngine
from tandem.decode_node.service.decode_calls import Grant, StartSequence
from tandem.decode_node.service.publisher import FramePublisher
from tandem.decode_node.service.sessions import Sessions
from tandem.kv_transfer import sink
from tandem.kv_transfer.messages import Offer, Seal
from tandem.runtime.computed_rows import ComputedRows
from tandem.runtime.frames import FrameServer
from tandem.runtime.parts import RankParts

log = logging.getLogger(__name__)
REMEMBER_ABORTS_S = 600.0
"""Seconds for which an aborted identity is remembered, to refuse its calls that arrive after the
abort."""


class KvReceiver(Protocol):
    """Interface of the part that brings a sequence's KV cache into its granted pages.

    ``pull`` returns once the cache is there. If the rank computes the prompt itself, nothing is
    transferred.
    """

    async def pull(
        self, offer: Offer, control: Control, pages: Sequence[int]
    ) -> sink.PullResult: ...

    def counts(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


class DecodeRank:
    """RPC service of a decode rank. The creator must start ``parts.loop``.

    Owns the pending grants, the pulls in flight and the sessions. Rows and pages belong to the
    engine. ``find_control(owner, epoch)`` returns the connection for control calls to an offer's
    prefill rank. ``stop`` ends the service and the loop.
    """

    def __init__(
        self, parts: RankParts, kv_receiver: KvReceiver, find_control: Callable[[str, int], Control]
    ) -> None:
        lease_s = parts.config.kv_transfer.lease_s
        self.spec = parts.spec
        self.pool = parts.pool
        self.loop = parts.loop
        self.kv_receiver = kv_receiver
        self._asyncio = asyncio.get_running_loop()
        self.sessions = Sessions(lease_s, self._asyncio.time)
        self.frames = FramePublisher(self.sessions, self._heartbeat)
        self.engine = DecodeEngine(parts, self.frames.publish, self._on_grant)
        self.info = parts.info()
        self._parts = parts
        self._rows = ComputedRows(parts.loop, parts.loaded.dispatch)
        self._find_control = find_control
        self._server = FrameServer(parts.spec.host, self.frames)
        self._pending_grants: dict[Identity, asyncio.Future[None]] = {}
        self._arrivals: dict[Identity, asyncio.Task[TransferStats]] = {}
        self._recently_ended = ExpiringMap[Identity, None](REMEMBER_ABORTS_S, self._asyncio.time)
        self._sweeper = self._asyncio.create_task(run_periodically(lease_s / 4, self._sweep))
        self.loop.on_failure(self._on_failure)
        self.loop.add(self.engine)
        methods: Methods = {
            "grant": (Grant, self._grant),
            "start": (StartSequence, self._start),
            "abort": (Identity, self._abort),
            "ping": (None, lambda _: self.loop.call(lambda: None)),
        }
        self.handle = Service(parts.spec.epoch_name, parts.spec.epoch, methods).handle

    @property
    def num_sequences(self) -> int:
        scheduler = self.engine.scheduler
        return len(scheduler.sequences) + scheduler.num_waiting

    async def listen(self) -> None:
        """Start to serve frames and add the address to ``info``."""
        self.info = replace(self.info, frames=await self._server.listen())

    async def stop(self) -> None:
        """Cancel all pulls, close all channels and stop the engine."""
        await cancel_and_wait(self._sweeper, *self._arrivals.values())
        await self._server.stop()
        await self.kv_receiver.close()
        await asyncio.to_thread(self.loop.stop)

    async def _grant(self, grant: Grant) -> None:
        """Wait until the sequence holds a row and pages.

        Raises HandoverError if the sequence is aborted.
        """
        identity = grant.identity
        self._check_not_aborted(identity)
        if self.sessions.session_of(identity) is not None:
            raise HandoverError(f"{identity} is already on this decode rank")
        self.sessions.add(grant.session, identity)
        granted = self._pending_grants[identity] = self._asyncio.create_future()
        try:
            # Post this before the first await, so that no abort can be posted before it.
            enqueued = self.loop.post(lambda: self.engine.enqueue(identity, grant.size))
            await asyncio.gather(asyncio.wrap_future(enqueued), granted)
        except BaseException:
            self.sessions.release(identity)
            raise
        finally:
            del self._pending_grants[identity]

    def _on_grant(self, identity: Identity) -> None:
        """Complete the pending grant of ``identity``. Called on the engine thread."""
        self._asyncio.call_soon_threadsafe(self._resolve_grant, identity, None)

    def _resolve_grant(self, identity: Identity, error: Exception | None) -> None:
        if identity in self._pending_grants:
            resolve(self._pending_grants[identity], error)

    async def _start(self, start: StartSequence) -> TransferStats:
        self._check_not_aborted(start.identity)
        if start.identity in self._arrivals:
            raise HandoverError(f"{start.identity}: its KV cache is already being received")
        task = self._arrivals[start.identity] = asyncio.create_task(self._receive(start))
        task.add_done_callback(partial(self._on_received, start.identity))
        await asyncio.wait([task])
        if task.cancelled():
            raise HandoverError(f"{start.identity} was aborted while its KV cache was received")
        return task.result()

    def _on_received(self, identity: Identity, task: "asyncio.Task[TransferStats]") -> None:
        """Forget a finished pull and retrieve its error.

        If the gateway has cancelled its call, nothing else retrieves the error, and asyncio would
        log it.
        """
        del self._arrivals[identity]
        if not task.cancelled():
            task.exception()

    async def _receive(self, start: StartSequence) -> TransferStats:
        """Fetch the KV cache and start the sequence. A failure drops the sequence.

        Raises:
            HandoverError, StepFailed: The attempt failed. Another attempt may succeed.
        """
        identity = start.identity
        offer = start.offer
        row = await self.loop.call(lambda: self.engine.scheduler.get_grant(identity))
        try:
            control = self._find_control(offer.owner, offer.epoch)
            pulled = await self.kv_receiver.pull(offer, control, row.pages)
            await self.loop.call(lambda: self._activate(start, pulled.seal))
        except (TandemError, ValueError):
            await self._drop(identity)
            raise
        except Exception as error:
            await self._drop(identity)
            raise HandoverError(f"{identity}: its KV cache was not received: {error!r}") from error
        return pulled.stats

    def _activate(self, start: StartSequence, seal: Seal) -> None:
        """Start the steps of a sequence whose cache is complete. Runs on the engine thread.

        Raises:
            HandoverError: The sequence was dropped while its cache arrived.
            StepFailed: The sequence could not be started, for instance for lack of device memory.
        """
        try:
            self._start_steps(start, seal)
        except TandemError:
            raise
        except Exception as error:
            raise StepFailed(f"{start.identity}: decoding did not start: {error!r}") from error

    def _start_steps(self, start: StartSequence, seal: Seal) -> None:
        # Rows copies the features to the device together with the rest of the row.
        features_F = None
        if seal.features is not None:
            dtype = getattr(torch, seal.features_dtype)
            features_F = torch.frombuffer(bytearray(seal.features), dtype=dtype)
        self.engine.activate(
            identity=start.identity,
            request=start.request,
            first_token=seal.first_token,
            features_F=features_F,
            is_suspect=start.is_suspect,
        )

    async def _abort(self, identity: Identity) -> None:
        """End a sequence in any phase. Repeated aborts are allowed.

        A pull is cancelled first, because its pages may be freed only after that. Later calls for
        this sequence are refused.
        """
        self._recently_ended.add(identity, None)
        self._resolve_grant(
            identity, HandoverError(f"{identity} was aborted while it waited for a decode row")
        )
        if identity in self._arrivals:
            await cancel_and_wait(self._arrivals[identity])
        await self._drop(identity)

    async def _drop(self, identity: Identity) -> None:
        self.sessions.release(identity)
        await self.loop.call(lambda: self.engine.drop(identity))

    def _check_not_aborted(self, identity: Identity) -> None:
        if identity in self._recently_ended:
            raise HandoverError(f"{identity} was aborted before this call arrived")

    async def _sweep(self) -> None:
        """Abort the sequences of expired sessions and forget old aborts."""
        for identity in self.sessions.sweep():
            log.warning("%s: aborting %s, because its gateway is gone", self.spec.gang, identity)
            await self._abort(identity)
        self._recently_ended.sweep()

    def _on_failure(self, error: BaseException) -> None:
        """Fail pending grants and readers: the engine has stopped. Called on the engine thread."""
        self._asyncio.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.frames.fail(error)
        for identity in self._pending_grants:
            self._resolve_grant(identity, RankDied(f"the engine stopped: {error!r}"))

    def _heartbeat(self, alive: tuple[Identity, ...]) -> Heartbeat:
        """Build a heartbeat with the engine thread's progress. Does not wait for that thread.

        ``alive`` are the sequences that the session holds.
        """
        num_waiting = self.engine.scheduler.num_waiting
        return Heartbeat(
            self.loop.stall_detector.measure_progress(), self._load(), num_waiting, alive=alive
        )

    def _load(self) -> RankLoad:
        engine = self.engine
        counts = self.kv_receiver.counts()
        steps = {name: getattr(engine, name) for name in ("num_steps", "step_s", "program_s")}
        return RankLoad(
            num_active_rows=len(engine.scheduler.sequences),
            num_free_tokens=self.pool.num_free_tokens,
            num_open_leases=counts["pulls"],
            num_channels=counts["channels"],
            num_quarantined=counts.get("quarantined", 0),
            counters=steps | engine.programs.counts() | self._parts.counters,
            kernels=f"{self._parts.loaded.kernels.name}, {engine.programs.exec_mode_status}",
            rows_by_layer=self._rows.latest(),
        )


async def build(parts: RankParts, find_control: Callable[[str, int], Control]) -> DecodeRank:
    """Create a decode rank, which pulls KV caches from prefill ranks, and start to serve frames.

    Raises ValueError if the rank cannot listen on its address.
    """
    rank = DecodeRank(
        parts,
        sink.Sink(parts.spec.rank_name, parts.spec.epoch, parts.transfer_endpoint()),
        find_control,
    )
    await rank.listen()
    return rank
