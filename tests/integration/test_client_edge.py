"""Both clients over real sockets: resumed streams, disconnects, deadlines and aborts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from tandem import AsyncClient, Client, InferenceError
from tandem.cluster.client import stream
from tandem.cluster.entrypoints.server import Server
from tandem.core.errors import Draining, RankLost
from tests.integration.echo_gateway import (
    EchoGateway,
    answer_to,
    echo_server,
    failure_of,
    text_of,
)
from tests.waiting import until, wait_until


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


async def test_the_sync_client_gives_the_same(server: Server, client: AsyncClient) -> None:
    def complete() -> tuple[object, ...]:
        with Client(server.address) as sync:
            answer = sync.complete([5, 6, 7], max_tokens=20)
            return answer, sync.status(), sync.model_info(), sync.abort("nobody")

    answer, status, model, found = await asyncio.to_thread(complete)
    assert answer == await client.complete([5, 6, 7], max_tokens=20)
    assert (status, model) == (await client.status(), await client.model_info())
    assert found is False


async def test_a_broken_stream_is_resumed_without_a_seam(
    client: AsyncClient, gateway: EchoGateway
) -> None:
    gateway.failures = [(n, RankLost("gone")) for n in (0, 4, 2, 0, 6, 12)]
    answer = await client.complete("abc", max_tokens=47, temperature=0.9)
    expected = answer_to(gateway.requests[0].prompt_ids, 47)
    assert answer.token_ids == expected
    assert answer.text == text_of(expected)
    assert len(gateway.requests) == 7
    assert len({request.request_id for request in gateway.requests}) == 1
    assert len({request.sampling for request in gateway.requests}) == 1


async def test_the_sync_client_resumes_too(server: Server, gateway: EchoGateway) -> None:
    gateway.failures = [(4, Draining("bye")), (30, RankLost("gone"))]
    with Client(server.address, backoff_s=0.01) as sync:
        answer = await asyncio.to_thread(sync.complete, "abc", max_tokens=30)
    assert answer.token_ids == answer_to(gateway.requests[0].prompt_ids, 30)
    assert answer.finished.finish_reason == "length"
    assert answer.finished.usage.completion == 0, "only Finished was missing"
    assert [len(request.output_ids) for request in gateway.requests] == [0, 4, 30]


async def test_a_stream_is_tried_again_for_a_time_and_not_a_number_of_times(
    server: Server, gateway: EchoGateway
) -> None:
    gateway.failures = [(4, RankLost("gone")), *[(0, RankLost("gone"))] * 1000]
    began = time.monotonic()
    async with AsyncClient(server.address, retry_s=1.0, backoff_s=0.001) as client:
        error = await failure_of(client.complete("abc", max_tokens=30))
    # time: how often it is tried within it says nothing
    assert time.monotonic() - began >= 1.0
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert error.token_ids == answer_to(gateway.requests[0].prompt_ids, 4)
    assert len(gateway.requests) > 7
    gateway.failures = [(0, RankLost("gone"))]
    async with AsyncClient(server.address, retry_s=0) as client:
        assert (await failure_of(client.complete("abc"))).code == grpc.StatusCode.UNAVAILABLE


async def test_whoever_answers_that_it_is_not_ready_is_no_stranger(
    monkeypatch: pytest.MonkeyPatch, server: Server, gateway: EchoGateway
) -> None:
    monkeypatch.setattr(stream, "UNREACHABLE_TIMEOUT_S", 0.0)
    gateway.failures = [(0, RankLost("no rank"))] * 6
    async with AsyncClient(server.address, backoff_s=0.01) as client:
        assert len((await client.complete("abc", max_tokens=9)).token_ids) == 9
    assert len(gateway.requests) == 7


async def test_where_nobody_ever_answered_it_is_soon_told_how_to_start_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "UNREACHABLE_TIMEOUT_S", 0.3)
    hint = "no server answers at 127.0.0.1:1; start one there with `tandem serve --set "
    async with AsyncClient("127.0.0.1:1") as client:
        for call in (client.complete("abc"), client.status()):
            error = await failure_of(call)
            assert error.code == grpc.StatusCode.UNAVAILABLE and hint in error.details
    with Client("127.0.0.1:1") as sync, pytest.raises(InferenceError, match=hint):
        await asyncio.to_thread(sync.complete, "abc")


async def test_several_answers_come_whole_or_not_at_all(
    server: Server, client: AsyncClient, gateway: EchoGateway
) -> None:
    """A stream of several answers is retried only before its first token."""
    answers = await client.complete_all("abc", n=3, max_tokens=9)
    expected = answer_to(gateway.requests[0].prompt_ids, 9)
    assert [(a.finished.index, a.token_ids) for a in answers] == [(i, expected) for i in range(3)]
    with Client(server.address) as sync:
        assert await asyncio.to_thread(sync.complete_all, "abc", n=3, max_tokens=9) == answers
    gateway.failures = [(0, RankLost("gone"))]
    assert await client.complete_all("abc", n=3, max_tokens=9) == answers
    gateway.failures = [(4, RankLost("gone"))]
    error = await failure_of(client.complete_all("abc", n=2, max_tokens=9))
    assert (error.code, error.token_ids) == (grpc.StatusCode.UNAVAILABLE, ())


async def test_a_client_that_leaves_frees_its_request(
    client: AsyncClient, gateway: EchoGateway
) -> None:
    gateway.hold_after = 4
    async with aclosing(client.generate("abc")) as pieces:
        await anext(pieces)
    await until(lambda: gateway.num_closed == 1)
    assert (await client.status()).num_running == 0


async def test_a_sync_client_that_leaves_frees_its_request(
    server: Server, gateway: EchoGateway
) -> None:
    def leave() -> None:
        with Client(server.address) as sync:
            for end in (1, 2):
                pieces = sync.generate("abc")
                next(pieces)
                if end == 1:
                    pieces.close()
                del pieces
                wait_until(lambda: not sync.status().num_running)

    gateway.hold_after = 4
    await asyncio.to_thread(leave)
    assert gateway.num_closed == 2


async def test_a_deadline_frees_its_request(client: AsyncClient, gateway: EchoGateway) -> None:
    gateway.hold_after = 4
    # time: a deadline, long enough for what comes before it
    error = await failure_of(client.complete("abc", timeout_s=2.0))
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(error.token_ids) == 4
    await until(lambda: gateway.num_closed == 1)


async def test_abort_ends_a_stream_even_after_a_resume(
    client: AsyncClient, gateway: EchoGateway
) -> None:
    gateway.hold_after = 4
    gateway.failures = [(2, RankLost("gone"))]
    task = asyncio.create_task(client.complete("abc", request_id="mine"))
    await until(lambda: len(gateway.requests) == 2)
    assert await client.abort("mine")
    assert (await task).finished.finish_reason == "abort"
    assert not await client.abort("mine")
    assert (await failure_of(client.abort(""))).code == grpc.StatusCode.INVALID_ARGUMENT
