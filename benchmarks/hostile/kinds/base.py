"""The interface of a hostile client."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import MAX_MESSAGE_BYTES, proxy_options

GENERATE = "/tandem.v1.Inference/Generate"


@dataclass(frozen=True)
class Target:
    """Addresses of a gateway as HOST:PORT. ``http`` is "" where the gateway has no HTTP port."""

    grpc: str
    http: str = ""


class Hostile(ABC):
    """A client that misbehaves in one way.

    Attributes:
        counts: Number of events by name, such as answers by their gRPC status.
        is_ready: Set when the client has reached its full strength.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.counts = Counter[str]()
        self.is_ready = asyncio.Event()

    @abstractmethod
    async def run(self) -> None:
        """Misbehave until cancelled."""

    async def call(self, stub: rpc.InferenceStub, message: pb.GenerateRequest) -> bool:
        """Send a request, read its answer to the end and count how it ended.

        Returns:
            Whether the answer came whole.
        """
        try:
            async for _ in stub.Generate(message):
                pass
            self.counts["OK"] += 1
            return True
        except grpc.aio.AioRpcError as error:
            self.counts[error.code().name] += 1
            return False


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[rpc.InferenceStub]:
    """Connect over a connection that this process shares with no other stub."""
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *proxy_options(),
    )
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield rpc.InferenceStub(channel)
