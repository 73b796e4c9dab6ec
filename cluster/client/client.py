"""Talk to a Tandem server from Python, without torch or Ray.

    from cluster.client.client import Client

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("def f(", max_tokens=64):
            print(piece.text, end="")

A stream that breaks with UNAVAILABLE is resumed where it broke; no token is lost or repeated.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self, Unpack

import grpc

from cluster.client.options import GenerateOptions
from cluster.client.stream import (
    CHANNEL_OPTIONS,
    Completion,
    InferenceError,
    Retries,
    StreamPlan,
    completions_of,
    inference_error,
)
from cluster.info import ModelInfo, ServerStatus
from cluster.proto import tandem_pb2 as pb
from cluster.proto import tandem_pb2_grpc as rpc
from cluster.proto.mapping import LastPiece, model_info_from_proto, status_from_proto
from core.request import Delta, Finished

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Finished",
    "GenerateOptions",
    "InferenceError",
]

CALL_TIMEOUT_S = 10.0
"""Deadline of every call but ``generate``."""


class Client:
    """One server's client for threads. Every call raises ``InferenceError`` if it fails."""

    def __init__(self, address: str, *, max_retries: int = 5, backoff_s: float = 0.2) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = rpc.InferenceStub(self._channel)
        self._retries = Retries(max_retries, backoff_s)
        self._names: dict[str, str] = {}

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generator[Delta | LastPiece, None, None]:
        """Stream the answer to ``prompt`` (text or token ids): deltas, then a ``Finished``; of each
        of ``n`` answers, told apart by ``index``.

        Every piece has ``text`` and ``token_ids``. Closing the generator ends the request.
        Raises ``ValueError`` at once if an option cannot be sent.
        """
        return self._follow(StreamPlan(prompt, self._retries, options))

    def complete(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer, the first of several; takes what ``generate`` takes."""
        return self.complete_all(prompt, **options)[0]

    def complete_all(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """All ``n`` answers, by index."""
        return completions_of(self.generate(prompt, **options))

    def abort(self, request_id: str) -> bool:
        """End a request; its stream gets ``Finished``. False if no such request is running."""
        name = self._names.get(request_id, request_id)
        return bool(self._call(self._stub.Abort, pb.AbortRequest(request_id=name)).found)

    def model_info(self) -> ModelInfo:
        return model_info_from_proto(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def status(self) -> ServerStatus:
        return status_from_proto(self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, plan: StreamPlan) -> Generator[Delta | LastPiece, None, None]:
        try:
            while True:
                message = plan.next_message()
                self._names[plan.request_id] = message.request_id
                call = self._stub.Generate(message, timeout=plan.remaining_s())
                problem: grpc.RpcError | None = None
                try:
                    for response in call:
                        piece = plan.receive(response)
                        yield piece
                        if plan.is_done:
                            return
                except grpc.RpcError as error:
                    problem = error
                finally:
                    call.cancel()
                time.sleep(plan.pause_after(problem))
        finally:
            self._names.pop(plan.request_id, None)

    def _call(self, method: Any, message: Any) -> Any:
        try:
            return method(message, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise inference_error(error) from error


class AsyncClient:
    """One server's client for asyncio: the calls of ``Client``, awaited.

    Build it inside the running loop.
    """

    def __init__(self, address: str, *, max_retries: int = 5, backoff_s: float = 0.2) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = rpc.InferenceStub(self._channel)
        self._retries = Retries(max_retries, backoff_s)
        self._names: dict[str, str] = {}

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta | LastPiece, None]:
        """As ``Client.generate``, for ``async for``."""
        return self._follow(StreamPlan(prompt, self._retries, options))

    async def complete(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """As ``Client.complete``."""
        return (await self.complete_all(prompt, **options))[0]

    async def complete_all(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """As ``Client.complete_all``."""
        return completions_of([piece async for piece in self.generate(prompt, **options)])

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream gets ``Finished``. False if no such request is running."""
        name = self._names.get(request_id, request_id)
        answer = await self._call(self._stub.Abort, pb.AbortRequest(request_id=name))
        return bool(answer.found)

    async def model_info(self) -> ModelInfo:
        return model_info_from_proto(
            await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        )

    async def status(self) -> ServerStatus:
        return status_from_proto(await self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _follow(self, plan: StreamPlan) -> AsyncGenerator[Delta | LastPiece, None]:
        try:
            while True:
                message = plan.next_message()
                self._names[plan.request_id] = message.request_id
                call = self._stub.Generate(message, timeout=plan.remaining_s())
                problem: grpc.RpcError | None = None
                try:
                    async for response in call:
                        piece = plan.receive(response)
                        yield piece
                        if plan.is_done:
                            return
                except grpc.RpcError as error:
                    problem = error
                finally:
                    call.cancel()
                await asyncio.sleep(plan.pause_after(problem))
        finally:
            self._names.pop(plan.request_id, None)

    async def _call(self, method: Any, message: Any) -> Any:
        try:
            return await method(message, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise inference_error(error) from error
