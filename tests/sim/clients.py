"""Clients that send requests through the typed client's streams (cluster/client/stream.py).

Messages and admission are the product's. Only gRPC between client and gateway is left out.
"""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from tandem.cluster.client.stream import InferenceError, StreamPlan
from tandem.cluster.entrypoints.request_mapping import to_raw_request
from tandem.cluster.entrypoints.status_codes import status_of
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto.grpc_settings import RETRY_AFTER_KEY, STREAM_KEY
from tandem.cluster.proto.mapping import piece_to_proto
from tandem.core.answer import Delta, Piece
from tandem.core.request import Request, SamplingParams
from tests.sim.loop import Process
from tests.sim.model import expected
from tests.sim.readers import Reader
from tests.sim.world import Gateway, World

RETRY_S, BACKOFF_S = 60.0, 0.2
"""Defaults of the typed client."""
HOP_S = 0.001
LEAVE, STAY_S = 0.2, 3.0
"""Share of clients that disconnect early, and the maximum time until they do."""


@dataclass(eq=False)
class Client:
    """One request with its ``right`` answer and the tokens received so far.

    The client disconnects after ``stays_s``. Its stream is then ``over``, and ``cancel`` ends the
    serving of it.
    """

    number: int
    plan: StreamPlan
    right: tuple[int, ...]
    stays_s: float | None = None
    has_left: bool = False
    over: "asyncio.Future[InferenceError | None] | None" = None
    cancel: Callable[[], None] | None = None
    token_ids: list[int] = field(default_factory=list)
    last_failure: str = ""
    reader: Reader = field(default_factory=Reader)
    began_at: float = math.inf
    done_at: float = math.inf

    @property
    def is_done(self) -> bool:
        return self.plan.is_done or self.has_left

    def pause_after(self, failure: InferenceError | None) -> float:
        """Return the pause before the next stream. Raises an error that the client cannot
        handle."""
        return self.plan.pause_after(failure)

    def take(self, response: pb.GenerateResponse) -> str:
        """Process a message; return the description of a fault in it, or ""."""
        piece = self.plan.receive(response)
        if isinstance(piece, Delta):
            self.token_ids += piece.token_ids
        right = self.right if self.is_done else self.right[: len(self.token_ids)]
        return "" if tuple(self.token_ids) == right else f"got {self.token_ids}, right is {right}"

    def end(self, failure: InferenceError | None) -> None:
        """End the client's current stream."""
        if self.over is not None and not self.over.done():
            self.over.set_result(failure)


@dataclass(frozen=True)
class Sent:
    """First message of a stream, as StreamPlan.start_call sends it."""

    message: pb.GenerateRequest
    metadata: dict[str, str]

    @classmethod
    def Generate(cls, message: Any, timeout: Any, metadata: Any) -> "Sent":
        return cls(pb.GenerateRequest.FromString(message.SerializeToString()), dict(metadata))


class Clients:
    """All clients of one world."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self._world, self.draw = world, draw
        self.all: list[Client] = []

    def make(self, may_leave: bool = False) -> Client:
        draw, number = self.draw, len(self.all)
        prompt = [draw.randrange(3, 90) for _ in range(draw.randint(4, 60))]
        asked: Any = {
            "max_tokens": draw.choice((1, 2, 4, 8, 16, 24)),
            "temperature": draw.choice((0.0, 0.0, 0.0, 0.8)),
            "seed": draw.randrange(1 << 30),
            "ignore_eos": True,
        }
        request = Request(f"r{number}", (*prompt,), sampling=SamplingParams(**asked))
        right = expected(request, self._world.config.model.max_model_len or 0, ())
        options: Any = asked | {"request_id": request.request_id}
        client = Client(number, StreamPlan(prompt, options, RETRY_S, BACKOFF_S), right)
        self.add(client, may_leave)
        return client

    def add(self, client: Client, may_leave: bool) -> None:
        """Add a client that is to start."""
        if may_leave and self.draw.random() < LEAVE:
            client.stays_s = self.draw.uniform(0.0, STAY_S)
        self.all.append(client)

    def begin(self, client: Client) -> None:
        client.began_at = self._world.loop.time()
        process = Process(self._world.loop, f"client-{client.number}")
        process.start(self._follow(client, process))
        if client.stays_s is not None:
            process.call(self._leave, client, after_s=client.stays_s)

    def _leave(self, client: Client) -> None:
        """Disconnect. The gateway notices, which cancels the serving of the stream."""
        if client.is_done:
            return
        client.has_left = True
        self._world.told("left", client.number)
        if client.cancel is not None:
            client.cancel()
        client.end(None)

    async def _follow(self, client: Client, process: Process) -> None:
        """Send the request to gateways until its answer is complete.

        An error that would reach the user is a failure, because a client must survive all faults
        used here.
        """
        while not client.is_done:
            ready = [one for one in self._world.gateways if one.admission and one.process.is_alive]
            if not ready:
                await asyncio.sleep(0.5)  # time: virtual
                continue
            failure = await self.stream(client, process, self.draw.choice(ready))
            if client.is_done:
                client.done_at = self._world.loop.time()
                return
            client.last_failure = str(failure)
            self._world.told("again", client.number, failure)
            try:
                pause_s = client.pause_after(failure)
            except InferenceError as error:
                return self._world.wrong(f"client {client.number} is refused: {error}")
            await asyncio.sleep(pause_s)  # time: virtual

    async def stream(
        self, client: Client, process: Process, gateway: Gateway
    ) -> InferenceError | None:
        """Try one stream; return the error that ended it, or None."""
        over = client.over = asyncio.get_running_loop().create_future()
        sent: Any = client.plan.start_call(Sent)  # type: ignore[arg-type]

        def take(response: pb.GenerateResponse) -> None:
            if not over.done():
                self._take(client, response)

        proofs: list[str] = []

        async def write(piece: Piece) -> None:
            assert gateway.gateway is not None
            message = piece_to_proto(piece, gateway.gateway.model.digest, *proofs)
            await client.reader.read(message.ByteSize())
            process.call(take, message, after_s=HOP_S)

        async def serve() -> None:
            failure = None
            assert gateway.admission is not None
            try:
                asked, nonce = to_raw_request(sent.message), sent.metadata[STREAM_KEY]
                await gateway.admission.answer(asked, write, nonce, proofs.append)
            except Exception as error:
                status = status_of(error)
                hint = dict(status.trailing_metadata).get(RETRY_AFTER_KEY)
                failure = InferenceError(status.code, status.details, hint and float(hint))
            process.call(client.end, failure, after_s=HOP_S)

        def begin() -> None:
            if not over.done():
                task = gateway.process.start(serve())
                client.cancel = partial(gateway.process.call, task.cancel, after_s=HOP_S)

        gone = InferenceError(grpc.StatusCode.UNAVAILABLE, "the gateway died")
        gateway.process.on_death.append(lambda: process.call(client.end, gone, after_s=HOP_S))
        gateway.process.call(begin, after_s=HOP_S)
        return await over

    def _take(self, client: Client, response: pb.GenerateResponse) -> None:
        wrong = client.take(response)
        if response.HasField("delta"):
            self._world.told("tokens", client.number, *response.delta.token_ids)
        else:
            self._world.told("done", client.number, response.finished.finish_reason)
        if wrong:
            self._world.wrong(f"client {client.number} {wrong}")
