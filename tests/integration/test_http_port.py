"""The HTTP port: probes and metrics of a server over a real cluster in this process."""

import asyncio
import gzip
import http.client
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from tandem import AsyncClient, Finished, InferenceError
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.core.config import TINY_MODEL, load
from tandem.core.membership import LOST
from tandem.decode_node.planning.step_plan import StepKey
from tests.integration.test_unread import NARROW, long_answer
from tests.rig import Rig, rig
from tests.waiting import until

ANY = "127.0.0.1:0"
SETS = f"server.address={ANY}", f"server.http_address={ANY}"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(address: str, path: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


async def ask(server: Server, path: str) -> tuple[int, str]:
    address = server.addresses["http"]
    assert address is not None
    return await asyncio.to_thread(get, address, path)


async def samples(server: Server) -> Samples:
    status, text = await ask(server, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynccontextmanager
async def served(*sets: str) -> AsyncIterator[tuple[Rig, Server, AsyncClient]]:
    async with rig(TINY_MODEL, *SETS, *sets) as cluster, Server(cluster.config) as server:
        await server.attach(cluster.gateway)
        async with AsyncClient(server.address, retry_s=0) as client:
            yield cluster, server, client


async def test_counts_are_the_clients_own() -> None:
    """Metrics equal the clients' counts: with and without drafts, for n > 1, aborted and
    refused."""
    async with served() as (_, server, client):
        asked = [
            {"prompt": f"def f{i}(", "max_tokens": 5 + i, "ignore_eos": True, "n": 1 + i % 2}
            for i in range(5)
        ]
        told = await asyncio.gather(*(_pieces(client, **one) for one in asked))
        ends = [piece for pieces in told for piece in pieces if isinstance(piece, Finished)]
        with pytest.raises(InferenceError):
            await _pieces(client, prompt="x", top_p=7.0)
        found = await samples(server)

    def total(name: str, **labels: str) -> float:
        return found[f"tandem_{name}", tuple(sorted(labels.items()))]

    assert total("request_success_total", finished_reason="length") == len(ends) == 7
    assert total("rejections_total", code="INVALID_ARGUMENT") == 1
    assert total("prompt_tokens_total") == sum(end.usage.prompt for end in ends)
    num_tokens = sum(len(piece.token_ids) for pieces in told for piece in pieces)
    assert total("generation_tokens_total") == num_tokens == sum(e.usage.completion for e in ends)
    assert total("prefix_cache_hits_total") == sum(end.usage.cached for end in ends)
    drafts = [end.speculation for end in ends]
    assert total("spec_decode_num_draft_tokens_total") == sum(one.num_nodes for one in drafts)
    assert total("spec_decode_num_accepted_tokens_total") == sum(one.num_accepted for one in drafts)
    assert total("spec_decode_num_drafts_total") == sum(o.drafted_per_position[0] for o in drafts)
    by_place = [
        total("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)
    ]
    assert by_place == [sum(one.accepted_per_position[i] for one in drafts) for i in range(3)]
    assert total("kv_transfer_bytes_total") == sum(end.kv_transfer.bytes for end in ends) > 0
    num_messages = sum(len(pieces) for pieces in told) - len(ends)
    assert total("time_to_first_token_seconds_count") == len(ends)
    assert total("inter_token_latency_seconds_count") == num_messages - len(ends)
    seconds = sum(end.timings_ms.total for end in ends) / 1e3
    assert total("e2e_request_latency_seconds_sum") == pytest.approx(seconds)
    assert total("request_time_per_output_token_seconds_count") == len(ends)
    assert total("num_requests_running") == total("num_requests_waiting") == 0


async def _pieces(client: AsyncClient, **asked: object) -> list[object]:
    return [piece async for piece in client.generate(**asked)]  # type: ignore[arg-type]


@asynccontextmanager
async def unread(*sets: str) -> AsyncIterator[tuple[Rig, Server]]:
    """Start a long answer whose client reads only one message."""
    async with (
        served(*sets) as (cluster, server, _),
        grpc.aio.insecure_channel(server.address, NARROW) as channel,
    ):
        call = rpc.InferenceStub(channel).Generate(long_answer([5, 6, 7]))
        await call.read()
        yield cluster, server
        call.cancel()


def number(found: Samples, name: str, **labels: str) -> float:
    return found[f"tandem_{name}", tuple(sorted(labels.items()))]


async def test_every_answer_that_was_let_in_ends_in_one_counter() -> None:
    """Covers answers that finish, are aborted, or lose their client, with and without a token."""
    async with served("decode.max_num_seqs=1", "kv.num_pages=40") as (cluster, server, client):
        how = {"max_tokens": 900, "ignore_eos": True}
        running = client.generate("abc", **how)
        await anext(running)
        waiting = {
            name: asyncio.create_task(_pieces(client, prompt=name, request_id=name, n=2, **how))
            for name in ("aborted", "left")
        }
        await until(lambda: len(cluster.gateway.open_answers) == 3)
        found = await samples(server)
        assert number(found, "num_requests_running") == 1
        assert number(found, "num_requests_waiting") == 4
        assert await client.abort("aborted")
        ends = await waiting["aborted"]
        waiting["left"].cancel()
        await running.aclose()
        await until(lambda: not server._streams)
        [*_, end] = await _pieces(client, prompt="xyz", max_tokens=5, ignore_eos=True)
        found = await samples(server)
    assert isinstance(end, Finished) and [one.finish_reason for one in ends] == ["abort"] * 2  # type: ignore[attr-defined]
    assert number(found, "request_success_total", finished_reason="abort") == 2
    assert number(found, "request_success_total", finished_reason="length") == 1
    assert number(found, "request_incomplete_total") == 1 + 2
    assert number(found, "e2e_request_latency_seconds_count") == 3
    assert number(found, "time_to_first_token_seconds_count") == 2
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time"):
        assert number(found, f"{name}_seconds_count") == 1, "that of the one that was computed"
    assert number(found, "prefix_cache_queries_total") == end.usage.prompt
    assert number(found, "num_requests_running") == number(found, "num_requests_waiting") == 0


async def test_a_call_that_fails_leaves_an_answer_incomplete() -> None:
    async with unread("server.write_timeout_s=0.5") as (_, server):
        await until(lambda: not server._streams)
        found = await samples(server)
    assert number(found, "request_incomplete_total") == 1
    assert number(found, "time_to_first_token_seconds_count") == 1


async def test_an_answer_that_is_only_left_unread_counts_no_more() -> None:
    async with unread("kv.num_pages=300", "kv.page_size=16") as (cluster, server):
        scheduler = cluster.decodes[0].engine.scheduler
        running = cluster.gateway.open_answers
        await until(lambda: not scheduler.sequences and not sum(map(len, running)))
        assert server._streams, "its client has not read it"
        found = await samples(server)
    assert number(found, "num_requests_running") == number(found, "num_requests_waiting") == 0


async def test_what_goes_wrong_in_steps_is_counted_and_is_no_label() -> None:
    async with served() as (cluster, server, client):
        before = {key for key in await samples(server) if key[0] == "tandem_rank_info"}
        programs = cluster.decodes[0].engine.programs
        programs.uncapturable = {}  # not those of the weights, which other clusters share
        for num in (1, 2, 57):
            programs._host_drafts.num_draftless_steps = num
            programs.uncapturable[StepKey(0, 0, num)] = (
                f"a program could not be recorded or captured: {num}"
            )
            await server_refreshed(cluster, num)
            found = await samples(server)
            assert {key for key in found if key[0] == "tandem_rank_info"} == before
            counted = _rank("decode-0", "decode")
            assert found["tandem_rank_draftless_steps_total", counted] == num
        assert found["tandem_rank_refused_programs_total", counted] == 3
        [rank] = [rank for rank in (await client.status()).ranks if rank.kind == "decode"]
        assert "57 steps without drafts" in rank.kernels and "or captured: 57" in rank.kernels
    labels = {dict(labels)["rank"]: dict(labels)["kernels"] for _, labels in before}
    assert labels["prefill-0"] in ("native", "torch")
    assert labels["decode-0"] in ("native, recorded", "plain, eager")


async def server_refreshed(cluster: Rig, num: int) -> None:
    """Wait for a heartbeat that counts ``num`` steps without drafts."""
    [rank] = [rank for rank in cluster.gateway.fleet.ranks.values() if rank.info.frames]
    await until(lambda: rank.heartbeat.load.counters["num_draftless_steps"] == num)


async def test_probes_say_what_health_says() -> None:
    async with rig(TINY_MODEL, *SETS) as cluster, Server(cluster.config) as server:
        assert await ask(server, "/livez") == (200, "alive\n")
        assert await ask(server, "/readyz") == (503, "not serving\n")
        await server.attach(cluster.gateway)
        assert await ask(server, "/readyz") == (200, "serving\n")
        [decode] = [rank for rank in cluster.gateway.fleet.ranks.values() if rank.info.frames]
        decode.liveness.mark_lost(RuntimeError("it died"))
        assert await ask(server, "/readyz") == (503, "not serving\n")
        assert (await ask(server, "/livez"))[0] == 200
        await until(lambda: cluster.gateway.is_healthy())
        assert await ask(server, "/readyz") == (200, "serving\n")
        await server.drain()
        assert await ask(server, "/readyz") == (503, "not serving\n")


async def test_a_loop_that_hangs_is_not_alive() -> None:
    """This blocking socket call keeps the server's event loop from running."""
    async with served() as (_, server, _):
        host, _, port = str(server.addresses["http"]).rpartition(":")
        with socket.create_connection((host, int(port))) as asker:
            asker.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            asker.settimeout(0.2)
            with pytest.raises(TimeoutError):
                asker.recv(1)
            asker.settimeout(None)
            assert (await asyncio.to_thread(asker.recv, 100)).startswith(b"HTTP/1.1 200")


async def test_who_speaks_another_protocol_is_sent_away() -> None:
    async with served() as (_, server, client):
        grpc_address, http_address = map(str, server.addresses.values())
        async with grpc.aio.insecure_channel(http_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        with pytest.raises((http.client.HTTPException, OSError)):
            await asyncio.to_thread(get, grpc_address, "/metrics")
        assert (await ask(server, "/nothing"))[0] == 404
        many = await asyncio.gather(*(ask(server, "/metrics") for _ in range(50)))
        assert {status for status, _ in many} == {200}
        assert [piece async for piece in client.generate("x", max_tokens=3)]


async def test_ranks_and_gangs_by_name() -> None:
    """A name may contain characters that have a meaning in the text format."""
    odd = 'de"co\\de\n0'
    async with served() as (cluster, server, _):
        prefill, decode = cluster.members.membership.gangs
        ranks = cluster.gateway.fleet.ranks.values()
        await until(
            lambda: all(r.heartbeat and r.heartbeat.load.counters["num_steps"] for r in ranks)
        )
        found = await samples(server)
        assert found["tandem_kv_cache_usage_perc", _rank("decode-0", "decode")] == 0
        assert found["tandem_rank_up", _rank("prefill-0", "prefill")] == 1
        assert found["tandem_rank_steps_total", _rank("decode-0", "decode")] > 0
        state = ("gang", odd), ("kind", "decode"), ("state", LOST)
        ended = replace(decode, name=odd, state=LOST, members=(), num_deaths=1)
        cluster.members.tell(prefill, decode, ended)
        await until(lambda: len(cluster.gateway.fleet.membership.gangs) == 3)
        found = await samples(server)
        assert found["tandem_gang_state", state] == 1
        assert found["tandem_gang_deaths_total", state[:2]] == 1
        assert found["tandem_gang_deaths_total", (("gang", "decode-0"), ("kind", "decode"))] == 0


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
OPEN, PLAIN = "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"
"""Content types for a scraper that knows OpenMetrics, and for one that sends no Accept header."""


FORMATS = {
    PROMETHEUS_2: OPEN,
    PROMETHEUS_3: OPEN,
    "application/openmetrics-text": OPEN,
    "text/plain;version=1.0.0;escaping=allow-utf-8,*/*;q=0.2": "text/plain; version=1.0.0",
    "text/plain;version=0.0.4;q=0.5": PLAIN,
    "text/plain;version=none": PLAIN,
    "*/*": PLAIN,
    "": PLAIN,
}
"""Content type by the scraper's Accept header."""


async def test_a_scraper_gets_a_format_that_it_knows() -> None:
    """prometheus_client's parsers read each format, and all formats have the same names."""
    async with served() as (_, server, client):
        await client.complete("abc", max_tokens=6, ignore_eos=True)
        for accept, expected in FORMATS.items():
            got = await scrape(server, accept=accept)
            kind = got.headers["content-type"]
            assert kind.startswith(expected) and "charset=utf-8" in kind, (accept, kind)
            names = names_of(got.body, kind)
            assert "tandem_generation_tokens_total" in names and "tandem_rank_up" in names
            assert "tandem_time_to_first_token_seconds_bucket" in names
            zipped = await scrape(server, accept=accept, **{"accept-encoding": "gzip"})
            assert zipped.headers["content-encoding"] == "gzip"
            assert "content-encoding" not in got.headers
            assert names_of(gzip.decompress(zipped.body), kind) == names
            head = await scrape(server, "HEAD", accept=accept)
            assert (head.status, head.body, head.headers["content-type"]) == (200, b"", kind)


def names_of(body: bytes, kind: str) -> set[str]:
    parse = openmetrics_families if kind.startswith(OPEN) else text_string_to_metric_families
    return {sample.name for family in parse(body.decode()) for sample in family.samples}


@dataclass(frozen=True)
class Scraped:
    status: int
    headers: dict[str, str]
    body: bytes


async def scrape(server: Server, method: str = "GET", **headers: str) -> Scraped:
    address = server.addresses["http"]
    assert address is not None
    return await asyncio.to_thread(_scrape, address, method, headers)


def _scrape(address: str, method: str, headers: dict[str, str]) -> Scraped:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, "/metrics", headers={"accept-encoding": "identity"} | headers)
    answer = connection.getresponse()
    told = {name.lower(): value for name, value in answer.getheaders()}
    return Scraped(answer.status, told, answer.read())


async def test_the_page_has_them_all() -> None:
    """docs/reference/metrics.md names what a scrape has, and nothing else."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`(tandem_\w+?)(?:_total)?(?:\{[a-z_,]+\})?`", text))
    async with served() as (_, server, _):
        _, told = await ask(server, "/metrics")
    assert named == {family.name for family in text_string_to_metric_families(told)}


def _rank(name: str, kind: str) -> tuple[tuple[str, str], ...]:
    return ("kind", kind), ("rank", name)


async def test_an_address_that_is_taken_is_told() -> None:
    async with rig(TINY_MODEL, *SETS) as cluster, Server(cluster.config) as server:
        address = server.addresses["http"]
        taken = load(None, [f"server.address={ANY}", f"server.http_address={address}"])
        with pytest.raises(ValueError, match=r"server\.http_address='127.*Address already in use"):
            async with Server(taken):
                pass
