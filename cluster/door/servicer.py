"""The four calls of ``tandem.v1.Inference`` over whatever ``Gateway`` answers them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc

from cluster.door.request_mapping import Tokenizer, ended_already, to_request
from cluster.door.status_codes import status_of
from cluster.info import DRAINING, STARTING, ModelInfo, ServerStatus
from cluster.proto import tandem_pb2 as pb
from cluster.proto import tandem_pb2_grpc as rpc
from cluster.proto.mapping import model_info_to_proto, piece_to_proto, status_to_proto
from core.errors import Draining
from core.request import Delta, Finished, Request, SpeculationCounts, Timings, TransferStats

_Answer = TypeVar("_Answer")
_Context: TypeAlias = grpc.aio.ServicerContext


class Gateway(Protocol):
    """What answers requests. Every error it raises becomes a status by ``status_of``."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Used from worker threads, several at once."""

    def model_info(self) -> ModelInfo:
        """What is served; does not change while serving."""

    async def status(self) -> ServerStatus:
        """The state of the cluster now."""

    def is_healthy(self) -> bool:
        """Whether new requests can be served: a usable pair of nodes is left."""

    def generate(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Deltas, and one ``Finished`` per answer. Closed or cancelled when the client has gone.

        The text of the deltas goes on where complete characters of ``request.output_ids`` end.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets ``Finished``. False if no such request is running."""


class InferenceServicer(rpc.InferenceServicer):
    """Refuses requests with UNAVAILABLE until it has a ``gateway`` and while ``draining``."""

    def __init__(self, mode: str) -> None:
        self.gateway: Gateway | None = None
        self.draining = False
        self._mode = mode
        self._streams: set[asyncio.Timeout] = set()
        self._request_ids: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """True as soon as no stream is open, False if one still is after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def evict(self) -> None:
        """End every open stream with UNAVAILABLE."""
        now = asyncio.get_running_loop().time()
        for stream in self._streams:
            if not stream.expired():
                stream.reschedule(now)

    async def Generate(self, message: pb.GenerateRequest, context: _Context) -> None:
        await _reporting(self._generate(message, context), context)

    async def Abort(self, message: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        return await _reporting(self._abort(message.request_id), context)

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: _Context
    ) -> pb.ModelInfo:
        return await _reporting(self._model_info(), context)

    async def GetStatus(self, message: pb.GetStatusRequest, context: _Context) -> pb.Status:
        return await _reporting(self._status(), context)

    async def _abort(self, request_id: str) -> pb.AbortResponse:
        if not request_id:
            raise ValueError("request_id='': name the request to abort")
        return pb.AbortResponse(found=await self._ready().abort(request_id))

    async def _model_info(self) -> pb.ModelInfo:
        return model_info_to_proto(self._ready().model_info())

    async def _status(self) -> pb.Status:
        if self.gateway is None:
            status = ServerStatus(STARTING, self._mode, 0)
        else:
            status = await self.gateway.status()
        state = DRAINING if self.draining else status.state
        return status_to_proto(replace(status, state=state, num_running=len(self._streams)))

    async def _generate(self, message: pb.GenerateRequest, context: _Context) -> None:
        gateway = self._ready()
        async with self._admitted():
            model = gateway.model_info()
            request = await asyncio.to_thread(to_request, message, model, gateway.tokenizer)
            with self._named(request.request_id):
                reason = ended_already(request, model)
                if reason is None:
                    await _send_answer(gateway, request, context)
                else:
                    await context.write(piece_to_proto(_nothing_left(request, reason)))

    def _ready(self) -> Gateway:
        if self.gateway is None:
            raise Draining("the server is still starting; try again in a while")
        return self.gateway

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Count a stream as open; ``Draining`` if there is no entry, or when it is evicted."""
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        stream = asyncio.timeout(None)
        self._streams.add(stream)
        self._idle.clear()
        try:
            async with stream:
                yield
        except TimeoutError as error:
            if stream.expired():
                raise Draining("the server shut down before the answer ended") from error
            raise
        finally:
            self._streams.remove(stream)
            if not self._streams:
                self._idle.set()

    @contextmanager
    def _named(self, request_id: str) -> Iterator[None]:
        if request_id in self._request_ids:
            raise ValueError(
                f"request_id={request_id!r}: a request of this name is running; "
                "use another or leave it empty"
            )
        self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.remove(request_id)


async def _send_answer(gateway: Gateway, request: Request, context: _Context) -> None:
    num_left = request.sampling.n
    async with aclosing(gateway.generate(request)) as pieces:
        async for piece in pieces:
            assert num_left, f"{request.request_id}: {piece} after the last Finished"
            num_left -= isinstance(piece, Finished)
            await context.write(piece_to_proto(piece))
    assert not num_left, f"{request.request_id}: the stream ended without a Finished"


def _nothing_left(request: Request, reason: str) -> Finished:
    """The end of an answer that the client has whole, only its ``Finished`` was lost."""
    return Finished(
        index=0,
        finish_reason=reason,
        num_prompt_tokens=len(request.prompt_ids),
        num_cached_tokens=0,
        num_completion_tokens=len(request.output_ids),
        counts=SpeculationCounts(),
        timings_ms=Timings(),
        kv_transfer=TransferStats(),
        seed=request.sampling.seed or 0,
    )


async def _reporting(call: Coroutine[Any, Any, _Answer], context: _Context) -> _Answer:
    """Await ``call``; an error ends the RPC with its status, unless the client has gone."""
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        status = status_of(error)
    except Exception as error:
        if context.cancelled():
            raise asyncio.CancelledError from error
        status = status_of(error)
    return await context.abort(status.code, status.details, status.trailing_metadata)
