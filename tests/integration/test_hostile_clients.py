"""Clients that flood, never read, abort at the wrong moment or send meaningless bytes."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.cluster.entrypoints.grpc_server import SERVICE
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import RETRY_AFTER_KEY
from tandem.core.answer import Delta, Finished
from tandem.core.request import Request
from tests.integration.echo_gateway import ByteTokenizer, EchoGateway, echo_server
from tests.waiting import PATIENCE_S, until

NARROW = (("grpc.http2.bdp_probe", 0),)
"""Options of a client whose flow-control windows stay small, so that a server soon waits for it."""


class HeldTokenizer(ByteTokenizer):
    """Keeps texts in their tokenising threads until ``go_on``."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_begun = 0

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        self.num_begun += 1
        assert self.go_on.wait(30)
        return super().encode(text)


class Flood(EchoGateway):
    """Sends endless answers. ``num_updates`` does not grow while the client does not read."""

    num_updates = 0

    async def generate(
        self, request: Request, aborted: asyncio.Event
    ) -> AsyncGenerator[Delta | Finished, None]:
        self.requests.append(request)
        try:
            while True:
                self.num_updates += 1
                yield Delta(0, (5,), "x" * 3900)
        finally:
            self.num_closed += 1

    async def blocked(self) -> None:
        """Wait until no update is produced for 0.2 s, in which a reading client gets many
        updates."""
        before = -1
        while before != self.num_updates or not before:
            before = self.num_updates
            await asyncio.sleep(0.2)  # time: too short a one ends the test's own part early


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[rpc.InferenceStub]:
    async with grpc.aio.insecure_channel(address, NARROW) as channel:
        yield rpc.InferenceStub(channel)


async def is_serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
async def gateway() -> EchoGateway:
    return EchoGateway()


@pytest.fixture
async def server(gateway: EchoGateway) -> AsyncIterator[Server]:
    async with echo_server(gateway) as server:
        yield server


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[rpc.InferenceStub]:
    async with stub_of(server.address) as stub:
        yield stub


@pytest.fixture
def held(gateway: EchoGateway) -> Iterator[HeldTokenizer]:
    gateway.tokenizer = tokenizer = HeldTokenizer()
    yield tokenizer
    tokenizer.go_on.set()


async def pieces_of(call: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [piece async for piece in call]


async def refusal_of(call: AsyncIterator[pb.GenerateResponse]) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pieces_of(call)
    return caught.value


@pytest.mark.parametrize("stops", [["x" * 1_000_000], ["x" * 1000] * 1_000], ids=["one", "many"])
async def test_a_megabyte_of_stop_strings_is_refused(
    stub: rpc.InferenceStub, gateway: EchoGateway, stops: list[str]
) -> None:
    """Otherwise each would make the gateway's event loop search all of them at every token."""
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.Sampling(stop=stops))
    error = await refusal_of(stub.Generate(message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.stop" in str(error.details()) and len(str(error.details())) < 300
    assert not gateway.requests


async def test_a_flood_is_refused_before_it_is_tokenised(
    gateway: EchoGateway, server: Server, stub: rpc.InferenceStub, held: HeldTokenizer
) -> None:
    """Requests beyond the bound are refused at once with a retry hint. Health and status still
    work."""
    gateway.max_streams = 3
    text = "x" * 100
    first = [asyncio.create_task(pieces_of(stub.Generate(asked(text)))) for _ in range(3)]
    await until(lambda: held.num_begun == 1 and len(server._streams) == 3)
    flood = [refusal_of(stub.Generate(asked(text))) for _ in range(200)]
    *errors, alive, status = await asyncio.gather(
        *flood,
        is_serving(server.address),
        stub.GetStatus(pb.GetStatusRequest()),
    )
    assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(RETRY_AFTER_KEY in dict(error.trailing_metadata()) for error in errors)
    assert alive and status.num_running >= 3 and held.num_begun == 1
    held.go_on.set()
    for pieces in await asyncio.gather(*first):
        assert pieces[-1].HasField("finished")


def asked(text: str, **fields: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.Sampling(max_tokens=8), **fields)


async def test_a_client_that_does_not_read_loses_its_stream_but_can_resume() -> None:
    flood = Flood()
    async with (
        echo_server(flood, "server.write_timeout_s=0.5") as server,
        stub_of(server.address) as stub,
    ):
        call = stub.Generate(asked("abc"))
        await until(lambda: flood.num_closed == 1)
        assert (await stub.GetStatus(pb.GetStatusRequest())).num_running == 0
        error = await refusal_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "left the answer unread for 0.5 s (server.write_timeout_s)" in error.details()


async def test_a_drain_ends_a_stream_that_nobody_reads() -> None:
    flood = Flood()
    async with echo_server(flood) as server, stub_of(server.address) as stub:
        call = stub.Generate(asked("abc"))
        await flood.blocked()
        async with asyncio.timeout(PATIENCE_S):
            await server.drain()
        assert flood.num_closed == 1
        call.cancel()


async def test_an_abort_that_overtakes_tokenising_ends_the_request(
    gateway: EchoGateway, stub: rpc.InferenceStub, held: HeldTokenizer
) -> None:
    """The request id is then in use."""
    victim = asyncio.create_task(pieces_of(stub.Generate(asked("abc", request_id="victim"))))
    await until(lambda: held.num_begun == 1)
    error = await refusal_of(stub.Generate(asked("abc", request_id="victim")))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "is running" in error.details()
    for _ in range(2):
        assert (await stub.Abort(pb.AbortRequest(request_id="victim"))).found
    held.go_on.set()
    [piece] = await victim
    assert piece.finished.finish_reason == "abort"
    assert not (await stub.Abort(pb.AbortRequest(request_id="victim"))).found


OURS = pb.DESCRIPTOR.services_by_name["Inference"].methods
METHODS = (
    *(f"/{SERVICE}/{method.name}" for method in OURS),
    f"/{health.SERVICE_NAME}/Check",
    f"/{health.SERVICE_NAME}/Watch",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
)


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_refused_with_a_line_each(
    server: Server, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        with caplog.at_level(logging.WARNING):
            for data in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x07"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await send(channel, method, data)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert (
                    f"{len(data)} bytes are not a valid message of {method}"
                    in caught.value.details()
                )
        assert len(caplog.records) == 3
        for record in caplog.records:
            assert method in record.getMessage() and record.exc_info is None
            assert len(record.getMessage().splitlines()) == 1


async def send(channel: grpc.aio.Channel, method: str, data: bytes) -> list[bytes]:
    """Send a message of raw bytes and return the answers."""
    if method.endswith("ReflectionInfo"):
        return [answer async for answer in channel.stream_stream(method)(iter([data]))]
    if method.endswith(("Generate", "Watch")):
        return [answer async for answer in channel.unary_stream(method)(data)]
    return [await channel.unary_unary(method)(data)]


async def test_methods_of_all_kinds_still_answer(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method in METHODS:
            if not method.endswith(("Watch", "Abort", "Generate")):
                assert len(await send(channel, method, b"")) == 1
        call = channel.unary_stream(f"/{health.SERVICE_NAME}/Watch")(b"")
        assert await call.read() == b"\x08\x01"
        call.cancel()
