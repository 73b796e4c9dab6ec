"""Started answers continue although servers are full, and unproven resumes wait in the queue."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.harness.exact import near_ties
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.client.options import build_request
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.cluster.proto.grpc_settings import STREAM_KEY
from tandem.core.errors import Overloaded, RankLost
from tandem.core.tasks import cancel_and_wait
from tandem.core.turns import NEW_REQUEST_SHARE
from tests.gates import Gate
from tests.integration.echo_gateway import EchoGateway, answer_to, echo_server, failure_of
from tests.rig import gateway, rig
from tests.scene import prompts
from tests.waiting import until

SETS = (
    *("server.address=127.0.0.1:0", "server.drain_timeout_s=0", "decode.max_num_seqs=1"),
    *("kv.page_size=8", "kv.num_pages=60"),
)
NAME = "mine"


@asynccontextmanager
async def stub_of(server: Server) -> AsyncIterator[rpc.InferenceStub]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield rpc.InferenceStub(channel)


@asynccontextmanager
async def served(
    model: Path,
) -> AsyncIterator[tuple[Any, Server, rpc.InferenceStub, AsyncClient]]:
    """A cluster with one row, its server, and two clients that never retry."""
    async with (
        rig(model, *SETS) as cluster,
        Server(cluster.config) as server,
        stub_of(server) as stub,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        await server.attach(cluster.gateway)
        yield cluster, server, stub, client


async def first_message(
    stub: rpc.InferenceStub, prompt: list[int], name: str, **options: Any
) -> pb.GenerateResponse:
    """Return the first message of a stream, which is then cancelled."""
    defaults: Any = {"request_id": name, "max_tokens": 30, "ignore_eos": True}
    call = stub.Generate(build_request(prompt, defaults | options), metadata=((STREAM_KEY, name),))
    try:
        message = await call.read()
        assert isinstance(message, pb.GenerateResponse)
        return message
    finally:
        call.cancel()


async def test_a_begun_answer_is_not_lost_where_its_next_server_is_full(small_model: Path) -> None:
    """The queue of that server stays full of requests that have not started."""
    async with (
        rig(small_model, *SETS, "server.max_queued=1") as cluster,
        gateway(cluster) as second,
        Server(cluster.config) as one,
        Server(cluster.config) as two,
        AsyncClient(f"ipv4:{one.address},{two.address}", backoff_s=0.01) as client,
        AsyncClient(two.address, retry_s=0) as others,
    ):
        await one.attach(cluster.gateway)
        await two.attach(second)
        gate = Gate(cluster.decodes[0])
        [prompt] = prompts(1, 10)
        answer = asyncio.create_task(client.complete(prompt, max_tokens=40, ignore_eos=True))
        running = cluster.gateway.open_answers
        await until(lambda: any(streams.num_with_tokens for streams in running) or answer.done())
        fills = [
            asyncio.create_task(others.complete([7, 8, i], max_tokens=100, ignore_eos=True))
            for i in (3, 4)
        ]
        await until(lambda: sum(map(len, second.open_answers)) == 2)
        with pytest.raises(Overloaded):
            second.check_queue(1)
        refusals: list[str] = []
        two.on_error = refusals.append
        stopping = asyncio.create_task(one.stop())
        await until(lambda: sum(map(len, second.open_answers)) == 3 or refusals, gate.answer)
        assert not refusals
        gate.open()
        tokens = list((await answer).token_ids)
        assert len(tokens) == 40 and not near_ties(small_model, prompt, tokens)
        assert all(len(fill.token_ids) == 100 for fill in await asyncio.gather(*fills))
        await stopping
        await cluster.check_empty()


class FullGateway(EchoGateway):
    """The queue is full for new requests, but has a slot left for answers that have started."""

    is_full = False

    def check_queue(self, num_answers: int, is_resumed: bool = False) -> None:
        if self.is_full and not is_resumed:
            raise Overloaded("the queue is full")


async def test_a_full_server_refuses_resumes_without_a_genuine_proof() -> None:
    """While there is capacity, resumes are answered like any other request."""
    echo = FullGateway()
    prompt = [5, 6, 7]
    tokens = answer_to((*prompt,), 30)
    async with echo_server(echo) as server, stub_of(server) as stub:
        proof = (await first_message(stub, prompt, NAME)).proof
        other = (await first_message(stub, [5, 6], NAME)).proof
        resume: Any = {"resume_token_ids": tokens[:4]}
        for false in ("", other, proof[:-1] + "g", "x"):
            echo.is_full = True
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first_message(stub, prompt, NAME, **resume, resume_proof=false)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            echo.is_full = False
            message = await first_message(stub, prompt, NAME, **resume, resume_proof=false)
            assert tuple(message.delta.token_ids) == tokens[4:6]
            assert message.proof not in ("", false)
        echo.is_full = True
        message = await first_message(stub, prompt, NAME, **resume, resume_proof=proof)
        assert tuple(message.delta.token_ids) == tokens[4:6] and message.proof == proof


async def test_open_streams_have_a_reserve_for_begun_answers() -> None:
    echo = EchoGateway()
    echo.max_streams = 1
    async with echo_server(echo, "decode.max_num_seqs=1") as server, stub_of(server) as stub:
        proof = (await first_message(stub, [5, 6, 7], NAME)).proof
        await until(lambda: not server._streams)
        echo.hold_after = 0
        call = stub.Generate(build_request([6], {"request_id": "open"}))
        await until(lambda: len(echo.requests) == 2)
        echo.hold_after = None
        resume: Any = {"resume_token_ids": answer_to((5, 6, 7), 2)}
        for false in ("", "x"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first_message(stub, [5, 6, 7], NAME, **resume, resume_proof=false)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        message = await first_message(stub, [5, 6, 7], NAME, **resume, resume_proof=proof)
        assert message.proof == proof
        call.cancel()


async def test_a_begun_answer_waits_as_long_as_a_full_server_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client retries more often than a server retries an answer, until ``retry_s`` has
    passed."""
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(AsyncClient, "_sleep", staticmethod(sleep))
    echo = EchoGateway()
    async with echo_server(echo) as server:
        async with AsyncClient(server.address) as client:
            full = [(0, Overloaded("full", retry_after_s=3.5))] * 6
            echo.failures = [(4, RankLost("gone")), *full]
            answer = await client.complete([5, 6, 7], max_tokens=30)
            assert answer.token_ids == answer_to((5, 6, 7), 30)
            assert len(echo.requests) == 8 and all(pause_s >= 3.5 for pause_s in pauses[1:])
            echo.failures = [*full]
            error = await failure_of(client.complete([5, 6, 7], max_tokens=30))
            assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED, "it has not begun"
            assert len(echo.failures) == 5
        echo.failures = [(4, RankLost("gone")), *full]
        async with AsyncClient(server.address, retry_s=0) as client:
            assert (await failure_of(client.complete([5, 6, 7]))).code.name == "UNAVAILABLE"
        echo.failures = [(4, Overloaded("full", retry_after_s=3.5))]
        async with AsyncClient(server.address, retry_s=0) as client:
            error = await failure_of(client.complete([5, 6, 7]))
            assert error.code.name == "RESOURCE_EXHAUSTED" and len(error.token_ids) == 4
            assert error.proof


@pytest.mark.parametrize("has_proof", [False, True], ids=["a claim", "a proof"])
async def test_clients_that_resume_in_a_loop_starve_nobody(
    small_model: Path, has_proof: bool
) -> None:
    """There is one row, and the clients want it again as soon as they get their first token."""
    async with served(small_model) as (cluster, server, stub, client):
        noted, begun = note_grants(cluster.decodes[0])
        proofs = {}
        for name in ("a", "b", "c"):
            proofs[name] = (await first_message(stub, [5, 6, 7], name)).proof

        async def resume_for_ever(name: str) -> None:
            proof = proofs[name] if has_proof else ""
            resume: Any = {"resume_token_ids": [5], "resume_proof": proof}
            while True:
                message = await first_message(stub, [5, 6, 7], name, **resume)
                assert message.proof == proof or not has_proof, "it counts"

        loops = [asyncio.create_task(resume_for_ever(name)) for name in proofs]
        await until(lambda: len(noted) > 20)
        honest = asyncio.create_task(client.complete([9, 9], max_tokens=2, request_id="honest"))
        await until(lambda: "grant honest" in noted or num_passed(noted) > 4 * NEW_REQUEST_SHARE)
        assert num_passed(noted) <= (NEW_REQUEST_SHARE - 1 if has_proof else num_before(noted))
        assert begun == (set(proofs) if has_proof else set())
        assert (await honest).token_ids
        assert not any(loop.done() for loop in loops)
        await cancel_and_wait(*loops)
        await until(lambda: not server._streams)
        await cluster.check_empty()


def note_grants(decode: Any) -> tuple[list[str], set[str]]:
    """Record the requests and grants of the decode rank from now on, and the requests that are
    marked as resumed."""
    scheduler, noted, begun = decode.engine.scheduler, list[str](), set[str]()
    ask, grant = scheduler.enqueue, scheduler.grant

    def noting_ask(identity: Any, size: Any) -> None:
        noted.append(f"ask {identity.request_id}")
        begun.update([identity.request_id] if size.is_resumed else [])
        ask(identity, size)

    def noting_grant() -> Any:
        granted = grant()
        noted.extend(f"grant {identity.request_id}" for identity in granted)
        return granted

    scheduler.enqueue, scheduler.grant = noting_ask, noting_grant
    return noted, begun


def num_before(noted: list[str]) -> int:
    """Return how many requests waited when the honest request came."""
    before = noted[: noted.index("ask honest")]
    return sum(1 if line.startswith("ask") else -1 for line in before)


def num_passed(noted: list[str]) -> int:
    """Return the number of grants between the honest request's arrival and its grant."""
    if "ask honest" not in noted:
        return 0
    after = noted[noted.index("ask honest") :]
    if "grant honest" in after:
        after = after[: after.index("grant honest")]
    return sum(line.startswith("grant") for line in after)


async def test_proofs_and_their_key_are_in_no_log_and_no_status(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with served(small_model) as (cluster, server, stub, client):
        proof = (await first_message(stub, [5, 6, 7], NAME)).proof
        for name in (NAME, "wrong", ""):
            resume: Any = {"resume_token_ids": [5], "resume_proof": proof}
            await first_message(stub, [5, 6, 7], name, **resume)
        wrong: Any = {"resume_token_ids": [-5], "resume_proof": proof}
        error = await failure_of(client.complete([5], request_id=NAME, **wrong))
        key = cluster.members.membership.proof_key
        shown = f"{caplog.text} {await client.status()} {await client.model_info()} {error!r}"
        assert proof and proof not in shown and proof.partition(".")[2] not in shown
        assert key and key.hex() not in shown and repr(key)[2:-1] not in shown
