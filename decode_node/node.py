"""One decode rank as its callers see it: bytes in, bytes out, no Ray.

Lives on an asyncio loop; the engine computes on the engine loop's thread. A sequence goes
reserve -> pull -> activate -> frames; ``abort`` ends it in any of these.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import torch

from core.control import Control
from core.errors import HandoverError, LayoutMismatch
from core.info import DECODE, NodeStatus
from core.request import TokenFrame
from core.schema import encode_failure, pack, unpack
from decode_node.engine import DecodeEngine
from decode_node.messages import Abort, Await, Done, Pulled, Reserve
from kv_transfer.messages import Offer, Seal
from kv_transfer.pages import PagePool
from kv_transfer.sink import Sink
from runtime.engine_loop import EngineLoop
from runtime.frames import Frame

log = logging.getLogger(__name__)


class DecodeNode:
    """Owns the pulls in flight; rows and pages belong to the engine. ``_reserving`` tells
    whether a reservation was aborted before the engine had answered it.

    ``find_owner`` gives the control of the prefill node that an offer names.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        fingerprint: str,
        pool: PagePool,
        device: torch.device,
        loop: EngineLoop,
        sink: Sink,
        find_owner: Callable[[str], Control],
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.sink = sink
        self.engine: DecodeEngine
        self._fingerprint = fingerprint
        self._pool = pool
        self._device = device
        self._loop = loop
        self._find_owner = find_owner
        self._reserving: dict[str, bool] = {}
        self._arriving: dict[str, asyncio.Task[Pulled]] = {}
        self._readers: set[Callable[[Frame], None]] = set()
        self._asyncio = asyncio.get_running_loop()
        loop.on_failure(self.publish)
        self._handlers: dict[str, Callable[[bytes], Awaitable[bytes]]] = {
            "reserve": self._reserve,
            "arrival": self._arrival,
            "abort": self._abort,
            "status": self._status,
        }

    async def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one control call; a failed one is answered by a packed Failure."""
        try:
            return await self._handlers[method](payload)
        except Exception as error:
            log.info("%s: %s failed: %s", self.name, method, error)
            return encode_failure(error)

    def subscribe(self, reader: Callable[[Frame], None]) -> Callable[[], None]:
        """Call ``reader`` with the packed TokenFrame of every step from now on, and with the
        error that stops the engine; returns what ends that."""
        self._readers.add(reader)
        return lambda: self._readers.discard(reader)

    async def frames(self) -> AsyncIterator[bytes]:
        """The same as an iterator, within one process; raises when the engine has stopped."""
        queue: asyncio.Queue[Frame] = asyncio.Queue()
        unsubscribe = self.subscribe(queue.put_nowait)
        try:
            while isinstance(frame := await queue.get(), bytes):
                yield frame
            raise RuntimeError(f"{self.name}: the decode engine stopped: {frame!r}")
        finally:
            unsubscribe()

    def publish(self, frame: TokenFrame | BaseException) -> None:
        """Hand a frame, or the engine's end, to every reader. Engine thread."""
        self._asyncio.call_soon_threadsafe(self._publish, frame)

    def _publish(self, frame: TokenFrame | BaseException) -> None:
        data = pack(frame) if isinstance(frame, TokenFrame) else frame
        for reader in self._readers:
            reader(data)

    async def _reserve(self, payload: bytes) -> bytes:
        """Row and pages now, KV as it is computed. A refusal holds nothing."""
        asked = unpack(Reserve, payload)
        request, offer = asked.request, asked.offer
        if offer.fingerprint != self._fingerprint:
            raise LayoutMismatch(
                f"cache layout {self._fingerprint} at {self.name}, {offer.fingerprint} at "
                f"{offer.owner}: both need the same checkpoint, dtype and drafter"
            )
        request_id = request.request_id
        if request_id in self._reserving:
            raise ValueError(f"request_id: {request_id!r} is already here; use another")
        self._reserving[request_id] = False
        try:
            sequence = await self._loop.call(lambda: self.engine.reserve(request))
        finally:
            is_aborted = self._reserving.pop(request_id)
        if is_aborted:
            # Its pages may be another's already: nothing may be pulled into them.
            raise HandoverError(f"{request_id!r} was aborted while it reserved")
        pull = self._pull(offer, list(sequence.pages))
        self._arriving[request_id] = asyncio.create_task(pull)
        return pack(Done())

    async def _pull(self, offer: Offer, pages: list[int]) -> Pulled:
        """Fetch the KV and start the sequence. After a failure the caller aborts it."""
        pulled = await self.sink.pull(offer, self._find_owner(offer.owner), pages)
        hidden_D = self._hidden(pulled.seal)
        first_token = pulled.seal.first_token
        await self._loop.call(lambda: self.engine.activate(offer.request_id, first_token, hidden_D))
        return Pulled(pulled.num_bytes, pulled.num_tokens, pulled.backend, pulled.wire_s)

    def _hidden(self, seal: Seal) -> torch.Tensor | None:
        if seal.hidden is None:
            return None
        dtype = getattr(torch, seal.hidden_dtype)
        return torch.frombuffer(bytearray(seal.hidden), dtype=dtype).to(self._device)

    async def _arrival(self, payload: bytes) -> bytes:
        request_id = unpack(Await, payload).request_id
        task = self._arriving.get(request_id)
        if task is None:
            raise HandoverError(f"{request_id!r} is not arriving at {self.name}")
        await asyncio.wait([task])
        if task.cancelled():
            raise HandoverError(f"{request_id!r} was aborted while it arrived")
        self._arriving.pop(request_id, None)
        return pack(task.result())

    async def _abort(self, payload: bytes) -> bytes:
        """The pull ends first: only then may its pages be freed."""
        request_id = unpack(Abort, payload).request_id
        if request_id in self._reserving:
            self._reserving[request_id] = True
        task = self._arriving.pop(request_id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._loop.call(lambda: self.engine.drop(request_id))
        return pack(Done())

    async def _status(self, payload: bytes) -> bytes:
        num_rows, num_free = await self._loop.call(
            lambda: (len(self.engine.scheduler.sequences), self._pool.num_available)
        )
        counts = self.sink.counts()
        status = NodeStatus(
            name=self.name,
            kind=DECODE,
            epoch=self.epoch,
            num_active_rows=num_rows,
            num_free_pages=num_free,
            num_pages=self._pool.num_pages,
            num_open_leases=counts["pulls"],
            num_channels=counts["channels"],
            num_steps=self.engine.num_steps,
            step_s=self.engine.step_s,
            program_s=self.engine.program_s,
            num_preempted=self.engine.num_preempted,
        )
        return pack(status)

    async def stop(self) -> None:
        """Cancel every pull, close every channel."""
        tasks = list(self._arriving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sink.close()
