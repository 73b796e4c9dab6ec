"""A cluster behind real gRPC, with gated engines and one request that is decoding."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness.held_out import held_out
from tandem.cluster.client.options import build_request
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.mapping import piece_from_proto
from tandem.prefill_node.sequence import PrefillSequence
from tests.gates import Gate, Wire, gated
from tests.rig import Rig, rig
from tests.waiting import until

SETS = (
    "server.address=127.0.0.1:0", "kv.page_size=8", "kv.num_pages=60", "decode.max_num_seqs=2",
    "prefill.max_num_batched_tokens=16",
)  # fmt: skip
OTHER = "other"


@dataclass
class Stream:
    """A request from its client's point of view."""

    ids: list[int]
    task: "asyncio.Task[str]"
    tokens: list[int]


async def _follow(call: Any, tokens: list[int]) -> str:
    """Return how the stream ends: a finish reason, or the name of its gRPC status."""
    reason = ""
    try:
        async for response in call:
            if response.HasField("delta"):
                tokens += response.delta.token_ids
            else:
                reason = piece_from_proto(response).finish_reason
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        call.cancel()
    return reason


@dataclass
class Scene:
    """A cluster with gated engines and one request that is decoding."""

    cluster: Rig
    server: Server
    stub: rpc.InferenceStub
    prefill: Gate
    decode: Gate
    to_prefill: Wire
    to_decode: Wire
    streams: dict[str, Stream] = field(default_factory=dict)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def ask(
        self,
        name: str,
        ids: list[int],
        max_tokens: int,
        timeout_s: float | None = None,
        num_answers: int = 1,
    ) -> None:
        """Send a request with this id and follow its stream."""
        message = build_request(
            ids,
            {"request_id": name, "max_tokens": max_tokens, "ignore_eos": True, "max_drafts": 1},
        )
        message.sampling.n = num_answers
        call = self.stub.Generate(message, timeout=timeout_s)
        tokens: list[int] = []
        task = asyncio.create_task(_follow(call, tokens))
        self.streams[name] = Stream(ids, task, tokens)

    def prefill_sequence(self, name: str) -> PrefillSequence | None:
        sequences = self.cluster.prefills[0].engine.scheduler.sequences
        return next((s for key, s in sequences.items() if key.request_id == name), None)

    def on_prefill(self, name: str) -> bool:
        [prefill] = self.cluster.prefills
        held = (prefill.engine.scheduler.sequences, prefill.source._book.open_identities())
        return any(identity.request_id == name for each in held for identity in each)

    def waits(self, name: str) -> bool:
        """Whether the request queues for a decode row."""
        queue = self.cluster.decodes[0].engine.scheduler.queue
        return any(i.request_id == name for i in (*queue.resumed, *queue.new))

    def holds_a_row(self, name: str) -> bool:
        sequences = self.cluster.decodes[0].engine.scheduler.sequences
        return any(identity.request_id == name for identity in sequences)

    def has_begun(self, name: str) -> bool:
        """Whether the KV transfer into the request's decode row has started or finished."""
        [decode] = self.cluster.decodes
        held = decode._arrivals, decode.engine.scheduler.running
        return any(name == one.identity.request_id for one in held[1]) or any(
            name == identity.request_id for identity in held[0]
        )

    def on_decode(self, name: str, num: int = 1) -> bool:
        """Whether the decode node holds anything of at least ``num`` answers of a request."""
        [decode] = self.cluster.decodes
        scheduler = decode.engine.scheduler
        held = (
            scheduler.sequences, scheduler.queue.resumed, scheduler.queue.new,
            decode._arrivals, decode._pending_grants, decode.sessions._owners,
        )  # fmt: skip
        found = {i for each in held for i in each if i.request_id == name}
        return len({identity.answer for identity in found}) >= num

    def is_answered(self, name: str) -> bool:
        """Whether the gateway has started the answer and its stream is being read."""
        stream = self.server._streams.get(name)
        return stream is not None and stream.answers is not None

    def is_held(self, name: str) -> bool:
        """Whether the gateway or a node holds anything of a request."""
        [handle] = self.cluster.gateway.fleet.of_kind("decode")
        return (
            self.is_answered(name)
            or any(identity.request_id == name for identity in handle.inboxes.queues)
            or self.on_prefill(name)
            or self.on_decode(name)
        )

    def answer(self) -> None:
        """Give a step to each engine for whose step a call waits."""
        for gate in (self.prefill, self.decode):
            gate.answer()

    def prefill_on(self) -> None:
        if self.prefill.is_held:
            self.prefill.give()
        self.yield_thread()
        self.answer()

    def yield_thread(self) -> None:
        """Give a decode step if it blocks prefill: colocated engines take turns on one thread."""
        [prefill], [decode] = self.cluster.prefills, self.cluster.decodes
        if prefill.loop is decode.loop and prefill.engine.has_work() and self.decode.is_held:
            self.decode.give()

    def decode_on(self, name: str) -> None:
        self.prefill_on()
        if self.decode.is_held and self.on_decode(name):
            self.decode.give()

    async def end(self, name: str, way: str) -> None:
        """End a request in one of three ways. A deadline was set when the request was sent."""
        stream = self.streams[name]
        if way == "drop":
            stream.task.cancel()
        elif way == "abort":
            assert (await self.stub.Abort(pb.AbortRequest(request_id=name))).found
        else:
            await stream.task


@asynccontextmanager
async def scene(path: Path, *sets: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(rig(path, *SETS, *sets))
        server = await stack.enter_async_context(Server(cluster.config))
        await server.attach(cluster.gateway)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        found = Scene(
            cluster,
            server,
            rpc.InferenceStub(channel),
            *await stack.enter_async_context(gated(cluster)),
        )
        found.ask(OTHER, prompts(1, 10)[0], 80)
        await until(lambda: found.streams[OTHER].tokens, found.prefill_on)
        await until(lambda: found.decode.is_held)
        yield found


def prompts(num: int, length: int) -> list[list[int]]:
    return held_out(num, length, length, seed=17)
