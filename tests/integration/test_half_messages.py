"""Calls with an incomplete message are ended, and hold little memory until then."""

import asyncio
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.http2 import Connection, connection
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.entrypoints import grpc_server, uploads
from tandem.cluster.entrypoints.grpc_server import SERVICE
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto.grpc_settings import MAX_MESSAGE_BYTES
from tandem.core.config import load
from tests.integration.echo_gateway import EchoGateway, echo_server
from tests.integration.test_hostile_clients import stub_of
from tests.waiting import PATIENCE_S, until

HALF = b"\0" + (1_000_000).to_bytes(4, "big") + b"\x0a" + b"x" * 600_000
"""More than half of a message that the server would accept."""
METHODS = ("Generate", "Abort", "GetModelInfo", "GetStatus")
WHOLE_NAME = f"/{SERVICE}/"


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def send_halves(attacker: Connection, num: int) -> list[int]:
    streams = [attacker.open(WHOLE_NAME + METHODS[i % len(METHODS)]) for i in range(num)]
    await asyncio.gather(*(attacker.upload(stream, HALF) for stream in streams))
    return streams


async def test_half_messages_are_ended_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_TIMEOUT_S", 0.3)
    async with echo_server(EchoGateway()) as server, connection(server.address) as attacker:
        streams = await send_halves(attacker, 4)
        await until(lambda: attacker.ended.keys() >= set(streams))
        for stream in streams:
            trailers = attacker.ended[stream]
            assert trailers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
            assert "did%20not%20arrive%20completely" in trailers["grpc-message"].replace(" ", "%20")


async def test_many_half_messages_hold_little_memory_and_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All incomplete messages come over one connection. A well-behaved call waits for its turn at
    most."""
    monkeypatch.setattr(uploads, "UPLOAD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(uploads, "CONTENDED_UPLOAD_TIMEOUT_S", 0.05)
    async with echo_server(EchoGateway()) as server, connection(server.address) as attacker:
        before = memory_mb()
        sending = asyncio.create_task(send_halves(attacker, 200))
        async with AsyncClient(server.address, retry_s=0) as honest:
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(20):
                    assert (await honest.complete("abc", max_tokens=4)).token_ids
        async with asyncio.timeout(PATIENCE_S):
            streams = await sending
            await until(lambda: attacker.ended.keys() >= set(streams))
        assert memory_mb() - before < 60, "200 halves are 120 MB"


async def test_a_call_without_a_message_is_refused() -> None:
    async with echo_server(EchoGateway()) as server, connection(server.address) as client:
        stream = client.open(WHOLE_NAME + "GetStatus")
        await client.upload(stream, b"", is_end=True)
        await until(lambda: stream in client.ended)
        invalid = str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert client.ended[stream]["grpc-status"] == invalid


async def test_a_message_may_be_as_long_as_the_context_needs() -> None:
    bound = uploads.max_message_bytes(load(None, ["model.max_model_len=1000"]))
    assert bound == uploads.BASE_MESSAGE_BYTES + 1000 * uploads.BYTES_PER_TOKEN
    longest = load(None, ["model.max_model_len=100000000"])
    assert uploads.max_message_bytes(longest) == MAX_MESSAGE_BYTES
    sets = ["server.address=127.0.0.1:0", "model.max_model_len=1000"]
    async with Server(load(None, sets)) as server, stub_of(server.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Abort(pb.AbortRequest(request_id="x" * bound))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()


async def test_connections_beyond_the_bound_are_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = tuple((key, 5 if "incoming" in key else value) for key, value in grpc_server._OPTIONS)
    monkeypatch.setattr(grpc_server, "_OPTIONS", options)
    async with echo_server(EchoGateway()) as server:
        host, _, port = server.address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]
        await until(lambda: sum(end.done() for end in ends) >= 7)
        for _, writer in opened:
            writer.close()
        async with AsyncClient(server.address) as honest:
            assert (await honest.complete("abc", max_tokens=4)).token_ids
        await asyncio.gather(*ends, return_exceptions=True)
