"""The four calls of ``tandem.v1.Inference`` over the gateway that answers them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc

from cluster.door.request_mapping import request_id, to_request
from cluster.door.status_codes import status_of
from cluster.proto import tandem_pb2 as pb
from cluster.proto import tandem_pb2_grpc as rpc
from cluster.proto.mapping import piece_to_proto, to_proto
from cluster.proto.wire import STREAM_KEY
from core.answer import Finished, Piece
from core.errors import Draining
from core.info import DRAINING, STARTING, ServerStatus
from core.request import Request

if TYPE_CHECKING:  # the client's commands need no torch
    from cluster.gateway.gateway import ClusterGateway

_Answer = TypeVar("_Answer")
_Message = TypeVar("_Message")
_Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(eq=False, slots=True)
class _Stream:
    """An open call of Generate. ``nonce`` is that of the client's stream, "" if it sent none."""

    nonce: str
    request_id: str = ""
    is_aborted: bool = False
    end_reason: str = ""
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    gone: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def end(self, reason: str) -> None:
        """Break it off with UNAVAILABLE."""
        if not self.scope.expired():
            self.end_reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())


def _reported(
    call: Callable[[Any, _Message, _Context], Coroutine[Any, Any, _Answer]],
) -> Callable[[Any, _Message, _Context], Coroutine[Any, Any, _Answer]]:
    """An error of ``call`` ends the RPC with its status, unless the client has gone, which a write
    of ours may be the first to learn."""

    @wraps(call)
    async def reported(self: Any, message: _Message, context: _Context) -> _Answer:
        try:
            return await call(self, message, context)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            is_ended = context.cancelled() or (task is not None and task.cancelling())
            if is_ended or isinstance(error, grpc.aio.InternalError):
                raise asyncio.CancelledError from error
            status = status_of(error)
        try:
            # It follows what the client leaves unread, and may wait here for as long as that stays.
            return await context.abort(status.code, status.details, status.trailing_metadata)
        except grpc.aio.InternalError:  # the client has gone
            raise asyncio.CancelledError from None

    return reported


class InferenceServicer(rpc.InferenceServicer):
    """Refuses requests with UNAVAILABLE until it has a ``gateway`` and while ``draining``. Every
    error that the gateway raises becomes a status by ``status_of``."""

    def __init__(self, mode: str, write_s: float) -> None:
        self.gateway: ClusterGateway | None = None
        self.draining = False
        self._mode = mode
        self._write_s = write_s
        self._streams: set[_Stream] = set()

    @property
    def is_serving(self) -> bool:
        """Whether requests belong here."""
        return self.gateway is not None and not self.draining and self.gateway.is_healthy()

    async def wait_idle(self, timeout_s: float) -> bool:
        """True as soon as those that are open now are not, False if one still is after
        ``timeout_s``; none may be added meanwhile."""
        if self._streams:
            await asyncio.wait([stream.gone for stream in self._streams], timeout=timeout_s)
        return not self._streams

    async def evict(self, timeout_s: float) -> None:
        """End every open stream with UNAVAILABLE; they have ``timeout_s`` to free things."""
        for stream in self._streams:
            stream.end("the server shut down before the answer ended")
        await self.wait_idle(timeout_s)

    @_reported
    async def Generate(self, message: pb.GenerateRequest, context: _Context) -> None:
        gateway = self._ready()
        nonce = dict(context.invocation_metadata() or ()).get(STREAM_KEY, "")
        async with self._admitted(_Stream(str(nonce))) as stream:
            message.request_id = request_id(message.request_id)
            await self._claim(message.request_id, stream)
            gateway.check_room(len(self._streams))
            request = await asyncio.to_thread(
                to_request, message, gateway.model_info(), gateway.tokenizer
            )
            pieces = gateway.generate(request, is_aborted=stream.is_aborted)
            await _send_answer(pieces, request, context, self._write_s)

    @_reported
    async def Abort(self, message: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        if not message.request_id:
            raise ValueError("request_id='': name the request to abort")
        found = [stream for stream in self._streams if stream.request_id == message.request_id]
        for stream in found:
            stream.is_aborted = True
        return pb.AbortResponse(found=await self._ready().abort(message.request_id) or bool(found))

    @_reported
    async def GetModelInfo(self, _: pb.GetModelInfoRequest, context: _Context) -> pb.ModelInfo:
        return to_proto(pb.ModelInfo, self._ready().model_info())

    @_reported
    async def GetStatus(self, _: pb.GetStatusRequest, context: _Context) -> pb.Status:
        if self.gateway is None:
            status = ServerStatus(STARTING, self._mode, 0)
        else:
            status = await self.gateway.status()
        state = DRAINING if self.draining else status.state
        return to_proto(pb.Status, replace(status, state=state, num_running=len(self._streams)))

    def _ready(self) -> "ClusterGateway":
        if self.gateway is None:
            raise Draining("the server is still starting; try again in a while")
        return self.gateway

    @asynccontextmanager
    async def _admitted(self, stream: _Stream) -> AsyncIterator[_Stream]:
        """Count a stream as open; ``Draining`` if there is no entry, or when it is ended."""
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        self._streams.add(stream)
        try:
            async with stream.scope:
                yield stream
        except TimeoutError as error:
            if stream.scope.expired():
                raise Draining(stream.end_reason) from error
            raise
        finally:
            self._streams.remove(stream)
            stream.gone.set_result(None)

    async def _claim(self, request_id: str, stream: _Stream) -> None:
        """Give ``stream`` the name. An earlier attempt at the same stream, whose break this server
        has not noticed, is ended first; ``ValueError`` if another request has the name."""
        while earlier := next((s for s in self._streams if s.request_id == request_id), None):
            if not stream.nonce or earlier.nonce != stream.nonce:
                raise ValueError(
                    f"request_id={request_id!r}: a request of this name is running; "
                    "use another or leave it empty"
                )
            earlier.end("a later attempt at this stream took its place")
            await asyncio.wait([earlier.gone])
        stream.request_id = request_id


async def _send_answer(
    answer: AsyncGenerator[Piece, None], request: Request, context: _Context, write_s: float
) -> None:
    num_left = request.sampling.n
    async with aclosing(answer) as pieces:
        async for piece in pieces:
            assert num_left, f"{request.request_id}: {piece} after the last Finished"
            num_left -= isinstance(piece, Finished)
            await _write(piece_to_proto(piece), context, write_s)
    assert not num_left, f"{request.request_id}: the stream ended without a Finished"


async def _write(message: pb.GenerateResponse, context: _Context, within_s: float) -> None:
    """``Draining`` if the client does not read it, nor what came before, in that time."""
    try:
        async with asyncio.timeout(within_s):
            await context.write(message)
    except TimeoutError:
        reason = f"the answer was left unread for {within_s:g} s (server.write_s); resume it"
        raise Draining(reason) from None
