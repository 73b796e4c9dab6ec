"""Bytes that are no message of the method they were sent to: refused, whatever the method."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

_log = logging.getLogger(__name__)
_Context: TypeAlias = grpc.aio.ServicerContext


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Ends such a call with INVALID_ARGUMENT and one line in the log, where grpc would say that
    the server failed, and log a traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        streams = handler.request_streaming, handler.response_streaming
        shape = "_".join("stream" if stream else "unary" for stream in streams)
        return _parsing(shape, handler, details.method)


def _parsing(shape: str, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
    """``handler`` getting bytes from grpc and parsing them itself."""

    async def parse(data: bytes, context: _Context) -> Any:
        try:
            return handler.request_deserializer(data)
        except Exception as error:  # what a parser raises has no type of its own
            reason = f"{len(data)} bytes are no message of {method} ({error})"
        _log.warning("%s; sent by %s", reason, context.peer())
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)

    async def behave(asked: bytes | AsyncIterator[bytes], context: _Context) -> Any:
        if isinstance(asked, bytes):
            message = await parse(asked, context)
        else:
            message = (await parse(data, context) async for data in asked)
        answer = getattr(handler, shape)(message, context)
        if not inspect.isasyncgen(answer):
            return await answer
        async for piece in answer:
            await context.write(piece)

    make = getattr(grpc, f"{shape}_rpc_method_handler")
    return make(behave, response_serializer=handler.response_serializer)
