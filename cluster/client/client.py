"""Python client of a Tandem server. It imports neither torch nor Ray.

    from tandem import Client

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("def f(", max_tokens=64):
            print(piece.text, end="")

A stream that breaks with UNAVAILABLE is resumed after the last received token: no token is lost or
repeated.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, ClassVar, TypeVar, Unpack

import grpc

from tandem.cluster.client.options import GenerateOptions, Prompt
from tandem.cluster.client.stream import Completion, InferenceError, StreamPlan, completions_of
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import MAX_MESSAGE_BYTES, proxy_options
from tandem.cluster.proto.mapping import from_proto
from tandem.core.answer import Piece
from tandem.core.info import ModelInfo, ServerStatus

CALL_TIMEOUT_S = 10.0
"""Deadline of every call except ``generate``, in seconds."""
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_T = TypeVar("_T")


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """Client of one server for asyncio. Create it inside the running loop.

    Every call raises ``InferenceError`` if it fails.

    Args:
        address: HOST:PORT of the server.
        retry_s: Maximum seconds, from the first failure, for which a broken stream is retried
            without a new token. At most UNREACHABLE_TIMEOUT_S while no server has ever answered at
            ``address``.
        backoff_s: Pause before the second attempt, in seconds; later pauses double.
    """

    _open_channel: ClassVar[Any] = staticmethod(grpc.aio.insecure_channel)
    _read: ClassVar[Any] = staticmethod(lambda call: call.read())
    _sleep: ClassVar[Any] = staticmethod(asyncio.sleep)

    def __init__(self, address: str, *, retry_s: float = 60.0, backoff_s: float = 0.2) -> None:
        self._channel = self._open_channel(address, options=(*_OPTIONS, *proxy_options()))
        self._stub = rpc.InferenceStub(self._channel)
        self._retry_s = retry_s
        self._backoff_s = backoff_s
        start = f"`tandem serve --set server.address={address}`"
        self._unreachable_text = f"no server answers at {address}; start one there with {start}"
        """Error text while no server has ever answered at this address; "" afterwards."""

    def generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Piece, None]:
        """Stream the answers to ``prompt`` (text or token ids).

        Yields deltas and then one ``Finished`` for each of the ``n`` answers; ``index`` says which
        answer a piece belongs to. Every piece has ``text`` and ``token_ids``. Closing the generator
        ends the request.

        Raises:
            ValueError: An option cannot be encoded. Raised by this call, before iteration.
        """
        return self._stream_with_retries(
            StreamPlan(
                prompt=prompt, options=options, retry_s=self._retry_s, backoff_s=self._backoff_s
            )
        )

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Return the whole answer, or the first of several. Takes the options of ``generate``."""
        return (await self.complete_all(prompt, **options))[0]

    async def complete_all(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Return all ``n`` answers, ordered by index. Takes the options of ``generate``."""
        return completions_of([piece async for piece in self.generate(prompt, **options)])

    async def abort(self, request_id: str) -> bool:
        """Abort a request, whose stream then ends with ``Finished``.

        Returns False if the request is not running.
        """
        answer = await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))
        return bool(answer.found)

    async def model_info(self) -> ModelInfo:
        """Return the properties and limits of the served model."""
        answer = await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return from_proto(ModelInfo, answer)

    async def status(self) -> ServerStatus:
        """Return the state of the server and of every rank."""
        answer = await self._call(self._stub.GetStatus, pb.GetStatusRequest())
        return from_proto(ServerStatus, answer)

    async def close(self) -> None:
        """Close the channel. Streams that are still open fail."""
        await _await_if_needed(self._channel.close())

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _stream_with_retries(self, plan: StreamPlan) -> AsyncGenerator[Piece, None]:
        while True:
            call = plan.start_call(self._stub)
            failure: InferenceError | None = None
            try:
                while (response := await _await_if_needed(self._read(call))) is not grpc.aio.EOF:
                    self._unreachable_text = ""
                    yield plan.receive(response)
                    if plan.is_done:
                        return
            except grpc.RpcError as error:
                failure = await self._failure(error)
            finally:
                call.cancel()
            await _await_if_needed(
                self._sleep(plan.pause_after(failure, not self._unreachable_text))
            )

    async def _call(self, method: Any, message: Any) -> Any:
        try:
            return await _await_if_needed(method(message, timeout=CALL_TIMEOUT_S))
        except grpc.RpcError as error:
            raise await self._failure(error) from error

    async def _failure(self, error: grpc.RpcError) -> InferenceError:
        """Convert ``error``. If no server listens at the address, the result explains that.

        A GetStatus call tests this, because every running server answers it.
        """
        failure = InferenceError.of(error)
        if self._unreachable_text and failure.code == grpc.StatusCode.UNAVAILABLE:
            try:
                await _await_if_needed(
                    self._stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
                )
                self._unreachable_text = ""
            except grpc.RpcError:
                failure.details = f"{self._unreachable_text} ({failure.details})"
        return failure


class _BlockingClient(AsyncClient):
    """Client whose coroutines block instead of suspending."""

    _open_channel = staticmethod(grpc.insecure_channel)
    _read = staticmethod(lambda call: next(call, grpc.aio.EOF))
    _sleep = staticmethod(time.sleep)


class Client(AbstractContextManager["Client"]):
    """Blocking client of one server, for use in threads. Same calls as ``AsyncClient``."""

    def __init__(self, address: str, *, retry_s: float = 60.0, backoff_s: float = 0.2) -> None:
        self._client = _BlockingClient(address, retry_s=retry_s, backoff_s=backoff_s)

    def generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Piece, None, None]:
        """Stream the answers to ``prompt``. See ``AsyncClient.generate``."""
        return _iterate_blocking(self._client.generate(prompt, **options))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Return the whole answer, or the first of several. See ``AsyncClient.complete``."""
        return _run_blocking(self._client.complete(prompt, **options))

    def complete_all(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Return all ``n`` answers, ordered by index. See ``AsyncClient.complete_all``."""
        return _run_blocking(self._client.complete_all(prompt, **options))

    def abort(self, request_id: str) -> bool:
        """Abort a request. See ``AsyncClient.abort``."""
        return _run_blocking(self._client.abort(request_id))

    def model_info(self) -> ModelInfo:
        """Return the properties and limits of the served model."""
        return _run_blocking(self._client.model_info())

    def status(self) -> ServerStatus:
        """Return the state of the server and of every rank."""
        return _run_blocking(self._client.status())

    def close(self) -> None:
        """Close the channel. Streams that are still open fail."""
        _run_blocking(self._client.close())

    def __exit__(self, *_: object) -> None:
        self.close()


async def _await_if_needed(result: Any) -> Any:
    """Return the result of a call: awaited on asyncio channels, unchanged on blocking ones."""
    return await result if inspect.isawaitable(result) else result


def _run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("a blocking call must not suspend")


def _iterate_blocking(pieces: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
    """Yield the items of an async generator that never suspends, and close it at the end."""
    try:
        while (piece := _run_blocking(anext(pieces, None))) is not None:
            yield piece
    finally:
        _run_blocking(pieces.aclose())
