"""Common handling of all gRPC calls.

Messages are received within bounds, malformed ones are refused, errors become gRPC statuses, and
the number of idle streams is limited.
"""

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

MAX_IDLE_PER_CONNECTION = 8
MAX_IDLE_STREAMS = 128
MAX_IDLE_STREAM_S = 300.0
_log = logging.getLogger(__name__)
_Context: TypeAlias = grpc.aio.ServicerContext
_Handler: TypeAlias = grpc.RpcMethodHandler


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that bounds calls and turns errors into statuses.

    A malformed message ends its call with INVALID_ARGUMENT and one line in the log. Without this,
    grpc would report a server error and log a traceback. Streams of all methods except Generate
    count as idle. Their number is bounded, because a client can keep them open at no cost.
    ``on_error`` receives the code of each failed call.
    """

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        # Number of idle streams of each connection, by the address of its client.
        self._idle = Counter[str]()
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
        call = _Call(
            handler=handler, method=details.method, uploads=self._uploads, on_error=self._on_error
        )
        make = getattr(
            grpc, f"stream_{_cardinality(handler.response_streaming)}_rpc_method_handler"
        )
        return make(partial(call.handle, permit), response_serializer=handler.response_serializer)

    @asynccontextmanager
    async def _idle_permit(self, context: _Context) -> AsyncIterator[None]:
        """Permit one more idle stream, for at most MAX_IDLE_STREAM_S.

        Aborts the call if there are too many.
        """
        peer = context.peer()
        if self._idle[peer] >= MAX_IDLE_PER_CONNECTION or self._idle.total() >= MAX_IDLE_STREAMS:
            reason = "too many health and reflection streams are open; close some"
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
    """End a call with the status of its error, and pass the code to ``on_error``.

    Nothing is reported if the client has disconnected. A failed write may be the first sign of
    that.
    """
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
            # The status follows all unread messages, so this waits until the client reads them.
            await context.abort(*status)
        except grpc.aio.InternalError:  # the client has gone
            raise asyncio.CancelledError from None


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error, which may hold megabytes of text.

    Otherwise a reference cycle in grpc keeps them until the garbage collector runs.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _cardinality(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"


@dataclass(frozen=True)
class _Call:
    """Handler of one method.

    It takes a stream of raw bytes even if the method takes one message. ``uploads`` can therefore
    bound how that message is received.
    """

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
            # Store the message in no variable: grpc may keep an error, and with it this frame.
            answer = method(await self._read_message(received, context), context)
            if not inspect.isasyncgen(answer):
                return await answer
            async for piece in answer:
                await context.write(piece)

    async def _read_message(self, received: AsyncIterator[bytes], context: _Context) -> Any:
        """Return the message of a call, or an iterator over the messages of a stream."""
        if self.handler.request_streaming:
            return (self._parse(data, context) async for data in received)
        return self._parse(await self.uploads.receive(received, context.peer()), context)

    def _parse(self, data: bytes, context: _Context) -> Any:
        try:
            return self.handler.request_deserializer(data)
        except Exception as error:  # parsers raise no specific type
            reason = f"{len(data)} bytes are not a valid message of {self.method} ({error})"
            _log.warning("refused a call: %s; sent by %s", reason, context.peer())
            raise ValueError(reason) from None
