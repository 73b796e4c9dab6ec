"""Talk to a Tandem server from Python, without torch or Ray.

    from tandem import Client

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("def f(", max_tokens=64):
            print(piece.text, end="")

A stream that breaks with UNAVAILABLE is resumed where it broke; no token is lost or repeated.
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
"""Deadline of every call but ``generate``."""
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_T = TypeVar("_T")


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """One server's client for asyncio. Every call raises ``InferenceError`` if it fails.

    Build it inside the running loop. A stream that breaks is tried again until ``retry_s`` have
    passed without a new token, UNREACHABLE_TIMEOUT_S if nobody has ever answered at ``address``;
    ``backoff_s`` is the first pause before another attempt.
    """

    _open_channel: ClassVar[Any] = staticmethod(grpc.aio.insecure_channel)
    _read: ClassVar[Any] = staticmethod(lambda call: call.read())
    _sleep: ClassVar[Any] = staticmethod(asyncio.sleep)

    def __init__(self, address: str, *, retry_s: float = 60.0, backoff_s: float = 0.2) -> None:
        self._channel = self._open_channel(address, options=(*_OPTIONS, *proxy_options()))
        self._stub = rpc.InferenceStub(self._channel)
        self._retry_s, self._backoff_s = retry_s, backoff_s
        start = f"`tandem serve --set server.address={address}`"
        self._unreachable_text = f"nobody answers at {address}; start a server there with {start}"
        """What to say as long as nobody has ever answered."""

    def generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Piece, None]:
        """Stream the answer to ``prompt`` (text or token ids): deltas, then a ``Finished``; of each
        of ``n`` answers, told apart by ``index``.

        Every piece has ``text`` and ``token_ids``. Closing the generator ends the request.
        Raises ``ValueError`` at once if an option cannot be sent.
        """
        return self._stream_with_retries(
            StreamPlan(prompt, options, self._retry_s, self._backoff_s)
        )

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer, the first of several; takes what ``generate`` takes."""
        return (await self.complete_all(prompt, **options))[0]

    async def complete_all(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """All ``n`` answers, by index."""
        return completions_of([piece async for piece in self.generate(prompt, **options)])

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets ``Finished``. False if no such request is running."""
        answer = await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))
        return bool(answer.found)

    async def model_info(self) -> ModelInfo:
        answer = await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return from_proto(ModelInfo, answer)

    async def status(self) -> ServerStatus:
        answer = await self._call(self._stub.GetStatus, pb.GetStatusRequest())
        return from_proto(ServerStatus, answer)

    async def close(self) -> None:
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
        """Says so if there is nobody at this address: every server tells its status."""
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
    """Its coroutines block and never suspend."""

    _open_channel = staticmethod(grpc.insecure_channel)
    _read = staticmethod(lambda call: next(call, grpc.aio.EOF))
    _sleep = staticmethod(time.sleep)


class Client(AbstractContextManager["Client"]):
    """One server's client for threads: the calls of ``AsyncClient``, without ``await``."""

    def __init__(self, address: str, *, retry_s: float = 60.0, backoff_s: float = 0.2) -> None:
        self._client = _BlockingClient(address, retry_s=retry_s, backoff_s=backoff_s)

    def generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Piece, None, None]:
        """As ``AsyncClient.generate``, for ``for``."""
        return _iterate_blocking(self._client.generate(prompt, **options))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """As ``AsyncClient.complete``."""
        return _run_blocking(self._client.complete(prompt, **options))

    def complete_all(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """As ``AsyncClient.complete_all``."""
        return _run_blocking(self._client.complete_all(prompt, **options))

    def abort(self, request_id: str) -> bool:
        """As ``AsyncClient.abort``."""
        return _run_blocking(self._client.abort(request_id))

    def model_info(self) -> ModelInfo:
        return _run_blocking(self._client.model_info())

    def status(self) -> ServerStatus:
        return _run_blocking(self._client.status())

    def close(self) -> None:
        _run_blocking(self._client.close())

    def __exit__(self, *_: object) -> None:
        self.close()


async def _await_if_needed(result: Any) -> Any:
    """What a call over either kind of channel gives."""
    return await result if inspect.isawaitable(result) else result


def _run_blocking(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("a blocking call was suspended")


def _iterate_blocking(pieces: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
    """The items of an async generator that never suspends; closing it closes that one."""
    try:
        while (piece := _run_blocking(anext(pieces, None))) is not None:
            yield piece
    finally:
        _run_blocking(pieces.aclose())
