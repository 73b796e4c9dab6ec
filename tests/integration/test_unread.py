"""Unread streams, early aborts and repeated aborts hold no row on any node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.http2 import Connection, connection
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway import admission, fan_out
from tandem.cluster.gateway import gateway as gateway_module
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.core.errors import Overloaded
from tests.rig import Rig, rig
from tests.scene import Scene, prompts, scene
from tests.waiting import until

SETS = (
    "server.address=127.0.0.1:0",
    "kv.num_pages=300",
    "kv.page_size=16",
    "decode.max_num_seqs=2",
)
NAME = "unread"
NUM_TOKENS = 700
"""Length of an answer. Its log probabilities exceed the window of a client that does not read."""
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Rig, rpc.InferenceStub]]:
    async with (
        rig(path, *SETS) as cluster,
        Server(cluster.config) as server,
        grpc.aio.insecure_channel(server.address, NARROW) as channel,
    ):
        await server.attach(cluster.gateway)
        yield cluster, rpc.InferenceStub(channel)
        await cluster.check_empty()


def long_answer(ids: list[int]) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
    return pb.GenerateRequest(request_id=NAME, token_ids=pb.TokenIds(ids=ids), sampling=sampling)


def num_unread(cluster: Rig) -> int:
    [streams] = cluster.gateway.open_answers
    return streams._queue.qsize()


def num_unread_bytes(cluster: Rig) -> int:
    return sum(streams.num_unread_bytes for streams in cluster.gateway.open_answers)


def num_rows(cluster: Rig) -> int:
    return len(cluster.decodes[0].engine.scheduler.sequences)


async def test_a_row_is_free_when_decode_is_done_though_nobody_has_read(small_model: Path) -> None:
    [ids] = prompts(1, 20)
    async with served(small_model) as (cluster, stub):
        call = stub.Generate(long_answer(ids))
        await until(lambda: num_rows(cluster) == 1)
        await until(lambda: num_rows(cluster) == 0)
        assert num_unread(cluster) > 20
        await cluster.check_empty()
        tokens = []
        async for piece in call:
            tokens += piece.delta.token_ids
        assert piece.finished.finish_reason == "length" and len(tokens) == NUM_TOKENS
        assert not near_ties(small_model, ids, tokens)


async def test_an_abort_frees_the_row_of_a_stream_that_nobody_reads(small_model: Path) -> None:
    [ids] = prompts(1, 20)
    async with served(small_model) as (cluster, stub):
        call = stub.Generate(long_answer(ids))
        await until(lambda: len(cluster.gateway.open_answers) and num_unread(cluster) > 20)
        for _ in range(2):
            assert (await stub.Abort(pb.AbortRequest(request_id=NAME))).found
        await until(lambda: num_rows(cluster) == 0)
        await cluster.check_empty()
        assert [p async for p in call][-1].finished.finish_reason == "abort"


async def test_a_request_aborted_while_it_is_tokenised_asks_for_no_row(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(small_model) as (cluster, stub):
        loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        tokenizer = cluster.gateway.tokenizer
        encode = tokenizer.encode

        def held(text: str, max_tokens: int | None = None) -> list[int]:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
            return encode(text)

        monkeypatch.setattr(tokenizer, "encode", held)
        num_steps = cluster.prefills[0].engine.num_steps
        sampling = pb.Sampling(n=3)
        call = stub.Generate(pb.GenerateRequest(request_id=NAME, text="abc", sampling=sampling))
        await begun.wait()
        assert (await stub.Abort(pb.AbortRequest(request_id=NAME))).found
        goes_on.set()
        ends = [piece.finished async for piece in call]
        assert [(end.finish_reason, end.usage.prompt > 1) for end in ends] == [("abort", True)] * 3
        assert cluster.prefills[0].engine.num_steps == num_steps


async def test_a_full_queue_refuses_before_it_tokenises(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(small_model, "server.max_queued=1") as at:
        gateway = at.cluster.gateway
        for name in ("runs", "waits"):
            gateway.check_queue(1)
            at.ask(name, prompts(1, 10)[0], 4)
            await until(lambda name=name: at.is_answered(name), at.answer)
        with pytest.raises(Overloaded, match="1 requests are already queued"):
            gateway.check_queue(1)
        monkeypatch.delattr(type(gateway.tokenizer), "encode")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(at.stub.Generate(pb.GenerateRequest(text="x" * 10_000))))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await go_on(at)
        gateway.check_queue(1)
        assert gateway.max_streams == 2 + 1 + 64


@pytest.mark.parametrize("way", ["abort", "drop"])
async def test_a_second_end_while_the_first_unwinds_changes_nothing(
    small_model: Path, way: str
) -> None:
    """The decode step is held, so that the release of the row waits for it."""
    async with scene(small_model) as at:
        at.ask(NAME, prompts(1, 10)[0], 30)
        await until(lambda: len(at.streams[NAME].tokens) >= 2, lambda: at.decode_on(NAME))
        await until(lambda: at.decode.is_held)
        await at.end(NAME, "abort")
        await until(lambda: at.decode.is_asked)
        assert at.is_answered(NAME), "it unwinds"
        await at.end(NAME, way)
        await until(lambda: not at.is_held(NAME), at.answer)
        [ended] = await asyncio.gather(at.streams.pop(NAME).task, return_exceptions=True)
        assert ended == "abort" or (way == "drop" and isinstance(ended, asyncio.CancelledError))
        await go_on(at)


async def go_on(at: Scene) -> None:
    """Check that all other requests finish and nothing is left."""
    at.prefill.open()
    at.decode.open()
    for stream in at.streams.values():
        assert await stream.task == "length"
    await at.cluster.check_empty()


TRICKLE_BYTES, TRICKLE_S = 700, 0.25


async def trickle(attacker: Connection, streams: list[int]) -> None:
    """Read a little of each stream again and again."""
    while True:
        await asyncio.sleep(TRICKLE_S)  # time: the rate is what is tested
        for stream in streams:
            if stream not in attacker.ended:
                attacker.allow(stream, TRICKLE_BYTES)


async def ask_without_reading(attacker: Connection, num: int) -> list[int]:
    sampling = pb.Sampling(max_tokens=400, ignore_eos=True, logprobs=20)
    streams = []
    for i in range(num):
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5 + i, 6, 7]), sampling=sampling)
        data = message.SerializeToString()
        stream = attacker.open("/tandem.v1.Inference/Generate")
        frame = b"\0" + len(data).to_bytes(4, "big") + data
        await attacker.upload(stream, frame, is_end=True)
        streams.append(stream)
    return streams


async def test_trickling_readers_keep_nobody_out(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow readers take all slots for open streams, and read too slowly to finish soon."""
    monkeypatch.setattr(gateway_module, "SPARE_STREAMS", 1)
    monkeypatch.setattr(admission, "STALLED_S", 0.1)
    async with (
        rig(small_model, *SETS, "server.max_queued=1", "server.write_timeout_s=60") as cluster,
        Server(cluster.config) as server,
        connection(server.address, stream_window=1000) as attacker,
    ):
        await server.attach(cluster.gateway)
        streams: list[int] = []
        trickling = asyncio.create_task(trickle(attacker, streams))
        for _ in range(cluster.gateway.max_streams):
            streams += await ask_without_reading(attacker, 1)
            num_streams = len(streams)
            await until(lambda num=num_streams: len(server._streams) == num)
            await until(lambda: not any(map(len, cluster.gateway.open_answers)))
        assert len(server._streams) == cluster.gateway.max_streams
        async with AsyncClient(server.address, retry_s=0) as honest:
            for _ in range(8):
                assert (await honest.complete([9, 9], max_tokens=2)).token_ids
        trickling.cancel()


async def test_a_reader_that_is_too_slow_is_ended_after_its_bound(
    small_model: Path,
) -> None:
    """Each piece alone waits for less than the bound; all of them together exceed it."""
    async with (
        rig(small_model, *SETS, "server.write_timeout_s=2") as cluster,
        Server(cluster.config) as server,
        connection(server.address, stream_window=1000) as attacker,
    ):
        await server.attach(cluster.gateway)
        streams = await ask_without_reading(attacker, 1)
        trickling = asyncio.create_task(trickle(attacker, streams))
        await until(lambda: server._streams)
        await until(lambda: not server._streams)
        assert attacker.num_received[streams[0]] < 60_000, "it was written whole"
        trickling.cancel()


async def test_what_is_left_unread_is_bounded_in_bytes(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "MAX_UNREAD_ANSWER_BYTES", 20_000)
    [ids] = prompts(1, 20)
    async with served(small_model) as (cluster, stub):
        call = stub.Generate(long_answer(ids))
        await until(lambda: num_unread_bytes(cluster) > 0)
        await until(lambda: num_unread_bytes(cluster) == 0 and num_rows(cluster) == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [piece async for piece in call]
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "of the answer unread" in str(caught.value.details())
        await until(lambda: num_rows(cluster) == 0)
