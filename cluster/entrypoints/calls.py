"""What holds for every call: a message is received within bounds, bytes that are no message of its
method are refused, an error becomes its status, and streams that cost a client nothing to keep are
few."""

import asyncio
import inspect
import logging
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from tandem.cluster.entrypoints.status_codes import status_of
from tandem.cluster.entrypoints.uploads import Uploads

MAX_IDLE_PER_CONNECTION, MAX_IDLE_STREAMS = 8, 128
MAX_IDLE_STREAM_S = 300.0
_log = logging.getLogger(__name__)
_Context: TypeAlias = grpc.aio.ServicerContext
_Handler: TypeAlias = grpc.RpcMethodHandler


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Ends a malformed call with INVALID_ARGUMENT and one line in the log, where grpc would say
    that the server failed, and log a traceback. All streams but those of Generate are idle ones.
    ``on_error`` hears the code of each call that fails."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self._on_error, self._idle = on_error, Counter[str]()
        """The latter of each connection, by the address of its other end."""
        self._uploads = Uploads()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        is_idle = handler.response_streaming and not details.method.endswith("/Generate")
        permit = self._idle_permit if is_idle else nullcontext
        call = _Call(handler, details.method, self._uploads, self._on_error)
        make = getattr(
            grpc, f"stream_{_cardinality(handler.response_streaming)}_rpc_method_handler"
        )
        return make(partial(call.handle, permit), response_serializer=handler.response_serializer)

    @asynccontextmanager
    async def _idle_permit(self, context: _Context) -> AsyncIterator[None]:
        """For one more idle stream, if there is one, and for MAX_IDLE_STREAM_S at most."""
        peer = context.peer()
        if self._idle[peer] >= MAX_IDLE_PER_CONNECTION or self._idle.total() >= MAX_IDLE_STREAMS:
            reason = "as many streams of health and reflection as there may be are open already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._idle[peer] += 1
        try:
            async with asyncio.timeout(MAX_IDLE_STREAM_S):
                yield
        except TimeoutError:
            context.set_code(grpc.StatusCode.UNAVAILABLE)
        finally:
            self._idle -= Counter([peer])


@asynccontextmanager
async def _report_errors(context: _Context, on_error: Callable[[str], None]) -> AsyncIterator[None]:
    """An error is told by its code and ends the call with its status, unless the client has gone,
    which a write of ours may be the first to learn."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        is_ended = context.cancelled() or (task is not None and task.cancelling())
        if is_ended or isinstance(error, grpc.aio.InternalError):
            raise asyncio.CancelledError from error
        try:
            on_error((status := status_of(error)).code.name)
            _forget_frames(error)
            # It follows what the client leaves unread, and may wait here for as long as that stays.
            await context.abort(*status)
        except grpc.aio.InternalError:  # the client has gone
            raise asyncio.CancelledError from None


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what an error's frames hold, which may be megabytes of text: grpc keeps the error
    of a call in a cycle that waits for the garbage collector."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _cardinality(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"


@dataclass(frozen=True)
class _Call:
    """A method as grpc calls it: every method takes a stream of bytes, also one of a single
    message, so that this message can be awaited within ``uploads``' bounds."""

    handler: _Handler
    method: str
    uploads: Uploads
    on_error: Callable[[str], None]

    async def handle(
        self, permit: Callable[[_Context], Any], received: AsyncIterator[bytes], context: _Context
    ) -> Any:
        async with permit(context), _report_errors(context, self.on_error):
            kinds = self.handler.request_streaming, self.handler.response_streaming
            method = getattr(self.handler, "_".join(map(_cardinality, kinds)))
            # No variable here has the message: an error in grpc's hands keeps this frame.
            answer = method(await self._read_message(received, context), context)
            if not inspect.isasyncgen(answer):
                return await answer
            async for piece in answer:
                await context.write(piece)

    async def _read_message(self, received: AsyncIterator[bytes], context: _Context) -> Any:
        """Return the message of a call, or an iterator over those of a stream."""
        if self.handler.request_streaming:
            return (self._parse(data, context) async for data in received)
        return self._parse(await self.uploads.receive(received, context.peer()), context)

    def _parse(self, data: bytes, context: _Context) -> Any:
        try:
            return self.handler.request_deserializer(data)
        except Exception as error:  # what a parser raises has no type of its own
            reason = f"{len(data)} bytes are no message of {self.method} ({error})"
            _log.warning("%s; sent by %s", reason, context.peer())
            raise ValueError(reason) from None
