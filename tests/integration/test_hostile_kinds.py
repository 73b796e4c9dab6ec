"""Each hostile client of the benchmark has its intended effect, and honest clients are served."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from benchmarks.hostile import honest
from benchmarks.hostile.honest import Figures
from benchmarks.hostile.kinds import KINDS, Target, half_messages, long_texts, silent
from benchmarks.hostile.report import is_within_bounds, summary
from benchmarks.hostile.rounds import Measured
from tandem.cluster.entrypoints import http_limits, uploads
from tandem.core.answer import Delta, Finished
from tandem.core.request import Request
from tests.integration.echo_gateway import EchoGateway, echo_server
from tests.waiting import until

EVENTS = {
    "long-texts": "INVALID_ARGUMENT",
    "half-messages": "status 4",
    "trickling-readers": "status 0",
    "resume-loops": "OK",
    "proven-loops": "proofs",
    "silent-connections": "ended",
    "connects": "opened",
}
"""The event by which each kind shows that it had its intended effect."""


class AnyResume(EchoGateway):
    """Answers resumed requests like fresh ones, whatever tokens they claim to have."""

    async def generate(
        self, request: Request, aborted: asyncio.Event
    ) -> AsyncGenerator[Delta | Finished, None]:
        fresh = replace(request, output_ids=())
        async with aclosing(super().generate(fresh, aborted)) as pieces:
            async for piece in pieces:
                yield piece


@pytest.mark.parametrize("kind", KINDS)
async def test_it_does_what_it_is_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_limits, "MAX_HTTP_CONNECTIONS", 8)
    monkeypatch.setattr(silent, "NUM_GRPC", 10)
    monkeypatch.setattr(silent, "NUM_HTTP", 12)
    monkeypatch.setattr(half_messages, "NUM_CALLS", 3)
    monkeypatch.setattr(long_texts, "NUM_CALLS", 1)
    async with echo_server(AnyResume(), "server.http_address=127.0.0.1:0") as server:
        http = str(server.addresses["http"])
        client = KINDS[kind](Target(server.address, http))
        running = asyncio.create_task(client.run())
        async with honest.streams(server.address, 2) as clients:
            found = await honest.measure(clients, ["abc"] * 6, (server.address, http))
        assert len(found.ttfts_s) == 6 and not found.refused
        await until(lambda: client.counts[EVENTS[kind]] or running.done())
        assert not running.done(), running
        running.cancel()


@pytest.mark.parametrize(
    ("change", "is_good"),
    [
        ({}, True),
        ({"ttft_p99_ratio": 2.1}, False),
        ({"itl_p99_ratio": 1.6}, False),
        ({"num_refused": 1}, False),
        ({"lost": ["decode-0"]}, False),
        ({"grown_mb": 21.0}, False),
    ],
)
def test_bounds_hold_for_each_figure(change: dict[str, object], is_good: bool) -> None:
    figures = Figures(ttfts_s=[0.1, 0.1], gaps_s=[0.01, 0.01])
    measured = Measured("connects", figures, figures, rss_mb=[100, 110, 120, 125, 129])
    measured.hostile_rates = measured.gateway_rates = [0.5]
    found = summary(measured)
    assert found["grown_mb"] == 19
    assert is_within_bounds(found | change) == is_good
