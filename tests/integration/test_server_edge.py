"""The gRPC server and both clients over real sockets, with a gateway that only echoes."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tandem import AsyncClient, Delta, Finished
from tandem.cluster.client.options import build_request
from tandem.cluster.entrypoints.grpc_server import SERVICE
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import STREAM_KEY
from tandem.core.config import load
from tandem.core.errors import Overloaded
from tandem.core.tasks import cancel_and_wait
from tests.integration.echo_gateway import (
    EchoGateway,
    answer_to,
    echo_server,
    failure_of,
    text_of,
)
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def gateway() -> EchoGateway:
    return EchoGateway()


@pytest.fixture
async def server(gateway: EchoGateway) -> AsyncIterator[Server]:
    async with echo_server(gateway) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, backoff_s=0.01) as client:
        yield client


async def health(address: str, service: str = SERVICE) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


async def test_an_answer_streams_in_order_and_whole(
    client: AsyncClient, gateway: EchoGateway
) -> None:
    pieces = [piece async for piece in client.generate("abc", max_tokens=41, seed=7)]
    *deltas, finished = pieces
    expected = answer_to(gateway.requests[0].prompt_ids, 41)
    assert tuple(token for delta in deltas for token in delta.token_ids) == expected
    assert "".join(piece.text for piece in pieces) == text_of(expected)
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.seed) == ("length", 7)
    assert (finished.usage.prompt, finished.usage.completion) == (4, 41)
    assert finished.kv_transfer.bytes == 10
    assert finished.speculation.accepted_per_position == (1, 1, 0)


async def test_status_and_model_info(client: AsyncClient, gateway: EchoGateway) -> None:
    status = await client.status()
    assert (status.state, status.mode, status.num_running) == ("SERVING", "disaggregated", 0)
    assert status.ranks == (await gateway.status(0)).ranks
    assert await client.model_info() == gateway.model


async def test_a_wrong_request_is_refused_and_harms_nobody(
    client: AsyncClient, gateway: EchoGateway
) -> None:
    for options in ({"temperature": -1.0}, {"top_k": -1}, {"max_drafts": 9}, {"request_id": " "}):
        error = await failure_of(client.complete("x", **options))
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT
        assert next(iter(options)) in error.details
    assert not gateway.requests
    assert (await client.complete("x", max_tokens=3)).finished.finish_reason == "length"
    wrong = {"max_tokens": 0}, {"resume_token_ids": [1 << 40]}, {"seed": 1 << 63}, {"top_n": 1}
    for options in wrong:
        with pytest.raises(ValueError):
            client.generate("x", **options)


@pytest.mark.parametrize("num_before", [0, 6])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ValueError("field: bad"), grpc.StatusCode.INVALID_ARGUMENT),
        (TimeoutError("slow"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (asyncio.CancelledError("gone"), grpc.StatusCode.CANCELLED),
        (KeyError("oops"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_errors_become_their_status(
    server: Server,
    gateway: EchoGateway,
    error: BaseException,
    code: grpc.StatusCode,
    num_before: int,
) -> None:
    gateway.failures = [(num_before, error)]
    async with AsyncClient(server.address, retry_s=0) as client:
        failure = await failure_of(client.complete("x", max_tokens=20))
    assert failure.code == code
    assert failure.retry_after_s == (2.5 if isinstance(error, Overloaded) else None)
    assert failure.token_ids == answer_to(gateway.requests[0].prompt_ids, num_before)
    if code == grpc.StatusCode.INTERNAL:
        assert failure.details.startswith("KeyError")


async def test_a_name_in_use_is_refused(client: AsyncClient, gateway: EchoGateway) -> None:
    gateway.hold_after = 0
    first = asyncio.create_task(client.complete("abc", request_id="same", max_tokens=2))
    await until(lambda: len(gateway.requests) == 1)
    error = await failure_of(client.complete("abc", request_id="same"))
    assert "request_id='same'" in error.details
    gateway.go_on.set()
    await first
    await client.complete("abc", request_id="same", max_tokens=2)


async def test_a_later_attempt_at_a_stream_ends_the_earlier_one_first(
    server: Server, gateway: EchoGateway
) -> None:
    """This is the case after a broken connection that only the client has noticed."""
    request = build_request("abc", {"request_id": "same", "max_tokens": 8})
    nonce = STREAM_KEY, "one"
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = rpc.InferenceStub(channel)

        def ask(*metadata: tuple[str, str]) -> "asyncio.Task[list[pb.GenerateResponse]]":
            return asyncio.create_task(_all(stub.Generate(request, metadata=metadata)))

        gateway.hold_after = 4
        first = ask(nonce)
        await until(lambda: len(gateway.requests) == 1)
        for other in (((STREAM_KEY, "another"),), ((STREAM_KEY, ""),), ()):
            with pytest.raises(grpc.aio.AioRpcError, match="request_id='same'.*is running"):
                await ask(*other)
        request.resume_token_ids[:] = answer_to(gateway.requests[0].prompt_ids, 4)
        second = ask(nonce)
        await until(lambda: len(gateway.requests) == 2)
        assert gateway.num_closed == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "replaced this stream" in caught.value.details()
        gateway.go_on.set()
        pieces = await second
    assert [len(piece.delta.token_ids) for piece in pieces] == [2, 2, 0]
    assert pieces[-1].finished.usage.completion == 4


async def _all(call: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def test_many_streams_at_once_do_not_mix(client: AsyncClient) -> None:
    prompts = [(i + 1, 3 * i) for i in range(24)]
    answers = await asyncio.gather(*(client.complete(p, max_tokens=30) for p in prompts))
    assert [answer.token_ids for answer in answers] == [answer_to(p, 30) for p in prompts]


async def test_nothing_is_served_before_a_gateway_is_attached(gateway: EchoGateway) -> None:
    async with (
        Server(load(None, ["server.address=127.0.0.1:0"])) as server,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        assert await health(server.address) == NOT_SERVING
        assert (await client.status()).state == "STARTING"
        for call in (client.complete("x"), client.model_info(), client.abort("x")):
            assert (await failure_of(call)).code == grpc.StatusCode.UNAVAILABLE
        await server.attach(gateway)
        for service in ("", SERVICE):
            assert await health(server.address, service) == SERVING
        gateway.is_healthy = lambda: False  # type: ignore[method-assign]
        assert await health(server.address) == NOT_SERVING


async def test_a_drain_lets_running_streams_finish(
    server: Server, client: AsyncClient, gateway: EchoGateway
) -> None:
    gateway.hold_after = 4
    running = asyncio.create_task(client.complete("abc", max_tokens=10))
    await until(lambda: len(gateway.requests) == 1)
    drain = asyncio.create_task(server.drain())

    async def is_told() -> bool:
        return await health(server.address) == NOT_SERVING

    await until(is_told)
    assert (await client.status()).state == "DRAINING"
    async with AsyncClient(server.address, retry_s=0) as late:
        error = await failure_of(late.complete("x"))
        assert error.code == grpc.StatusCode.UNAVAILABLE
    gateway.go_on.set()
    assert (await running).finished.finish_reason == "length"
    await drain


async def test_requests_are_taken_while_a_server_says_that_it_leaves(gateway: EchoGateway) -> None:
    async with (
        echo_server(gateway, "server.lame_duck_s=3600") as server,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        drain = asyncio.create_task(server.drain())

        async def is_told() -> bool:
            return await health(server.address) == NOT_SERVING

        await until(is_told)
        assert (await client.status()).state == "DRAINING"
        assert (await client.complete((7,), max_tokens=5)).token_ids == answer_to((7,), 5)
        await cancel_and_wait(drain)


async def test_an_old_connection_is_left_and_its_answer_goes_on(gateway: EchoGateway) -> None:
    """Streams still open when their connection is too old end with it, and resume over a new
    one."""
    gateway.hold_after = 4
    async with (
        echo_server(gateway, "server.max_connection_age_s=0.2") as server,
        AsyncClient(server.address, backoff_s=0.01) as client,
    ):
        running = asyncio.create_task(client.complete((7,), max_tokens=30))
        await until(lambda: len(gateway.requests) > 1)
        assert len(gateway.requests[1].output_ids) == 4
        gateway.go_on.set()
        assert (await running).token_ids == answer_to((7,), 30)


async def test_a_drain_ends_what_does_not_finish(server: Server, gateway: EchoGateway) -> None:
    gateway.hold_after = 4
    async with AsyncClient(server.address, retry_s=0) as client:
        running = asyncio.create_task(client.complete("abc"))
        await until(lambda: len(gateway.requests) == 1)
        await server.drain()
        assert gateway.num_closed == 1
        error = await failure_of(running)
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert "shut down" in error.details and len(error.token_ids) == 4


async def test_a_port_in_use_is_told(server: Server) -> None:
    with pytest.raises(ValueError, match="Address already in use.*--set server.address"):
        async with Server(load(None, [f"server.address={server.address}"])):
            raise AssertionError("two servers have one address")


async def test_reflection_describes_the_service(server: Server) -> None:
    def services() -> list[str]:
        with grpc.insecure_channel(server.address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {SERVICE, "grpc.health.v1.Health"} <= set(await asyncio.to_thread(services))


async def test_a_long_prompt_fits_through_the_wire(client: AsyncClient) -> None:
    """The prompt is far too long for the model as well, so that the error names the tokens."""
    error = await failure_of(client.complete("x" * 1_000_000))
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "1000001 tokens" in error.details


async def test_other_languages_get_the_bare_proto(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = rpc.InferenceStub(channel)
        request = pb.GenerateRequest(text="a", sampling=pb.Sampling(max_tokens=2))
        kinds = [response.WhichOneof("piece") async for response in stub.Generate(request)]
    assert kinds == ["delta", "finished"]
