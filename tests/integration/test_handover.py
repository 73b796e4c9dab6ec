"""Whole hand-overs, over gloo between two OS processes and over loopback inside one."""

import asyncio
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.errors import HandoverError, LayoutMismatch, RankLost, StalePages
from tandem.core.identity import Identity
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.layout import Layout
from tandem.kv_transfer.messages import Offer
from tandem.kv_transfer.sink import Sink
from tests.integration.handover_peer import (
    CONFIG,
    DEADLINES,
    EPOCH,
    LAYOUT,
    Rank,
)
from tests.integration.handover_world import Process, World, offer, over_loopback, over_process
from tests.waiting import PATIENCE_S, until

BYTES_PER_TOKEN = sum(group.bytes_per_token_all_layers for group in LAYOUT.groups)


def named(asked: Offer) -> dict[str, Any]:
    return {"request_id": asked.identity.request_id, "attempt": asked.identity.attempt}


async def waits(world: World) -> bool:
    """Whether a pull has received all that is computed, and waits for more."""
    return bool((await world.tell("report"))["waiting"])


@pytest.fixture(scope="module")
def gloo_process() -> Iterator[Process]:
    process = Process()
    yield process
    process.stop()


@pytest.fixture(params=["loopback", "gloo"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    gloo = request.param == "gloo"
    side = over_process(request.getfixturevalue("gloo_process")) if gloo else over_loopback()
    async with side as world:
        yield world
        await world.check_clean()
    names = "channel-", "kv-"  # one may just be starting, and cannot be joined
    await until(lambda: not any(t.name.startswith(names) for t in threading.enumerate()))


async def test_bytes_are_equal_and_counted(world: World) -> None:
    asked = offer(33)
    running = world.prefill(asked)
    began = time.perf_counter()
    pulled, pages = await world.pull(asked)
    seconds = time.perf_counter() - began
    await running
    await world.check_bytes(asked, pages)
    stats = pulled.stats
    assert stats.bytes == 33 * BYTES_PER_TOKEN and stats.backend == world.channel_factory.backend
    assert 0 < stats.seconds < seconds  # time: of its own clock, within that of ours
    assert (pulled.seal.first_token, pulled.seal.features_dtype) == (77, "float32")
    assert pulled.seal.features is not None and struct.unpack("4f", pulled.seal.features)[3] == 4.0
    report = await world.check_clean(channels=1)
    assert report["asked"].count("send") == 5 + 2


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 20, 21])
async def test_lengths_around_page_borders(world: World, num_tokens: int) -> None:
    asked = offer(num_tokens)
    running = world.prefill(asked)
    _, pages = await world.pull(asked)
    await running
    await world.check_bytes(asked, pages)


async def test_a_pull_follows_a_chunked_prefill(world: World) -> None:
    asked = offer(60)
    await world.sink._link("p0", "p0", EPOCH, world.control()).ensure_channel()
    pulling = asyncio.create_task(world.pull(asked))
    await until(lambda: waits(world))
    await world.tell("open", **named(asked))
    for hi in range(10, 70, 10):
        assert not pulling.done(), "chunks wait for the end of prefill"
        await world.tell("go_on", **named(asked), hi=hi, num_tokens=60, seal=True)
        await until(lambda: pulling.done() or waits(world))
    pulled, pages = await pulling
    await world.check_bytes(asked, pages)
    assert pulled.stats.bytes == 60 * BYTES_PER_TOKEN


async def test_many_pulls_share_one_channel_and_little_staging(world: World) -> None:
    offers = [offer(17 + 3 * i) for i in range(8)]
    running = [world.prefill(asked, step=9) for asked in offers]
    results = await asyncio.gather(*(world.pull(asked) for asked in offers))
    await asyncio.gather(*running)
    for asked, (_, pages) in zip(offers, results, strict=True):
        await world.check_bytes(asked, pages)
    await world.check_clean(channels=1)


async def test_the_lease_lives_while_a_slow_prefill_is_followed(world: World) -> None:
    asked = offer(20)
    running = world.prefill(asked, step=10, delay_s=CONFIG.lease_s)
    _, pages = await world.pull(asked)
    await running
    await world.check_bytes(asked, pages)
    assert "renew" in (await world.check_clean())["asked"]


async def test_an_unpulled_offer_expires_and_is_refused_after(world: World) -> None:
    before = (await world.tell("report"))["released"]
    asked = offer(20)
    await world.prefill(asked)
    assert (await world.tell("report"))["pages"] == 4
    report = await world.check_clean()
    assert report["released"] == before + 1
    with pytest.raises(HandoverError, match="the lease of 1.2 s expired"):
        await world.pull(asked)
    assert (await world.check_clean())["released"] == before + 1, "released once, not twice"


@pytest.mark.parametrize("number", [0, -1])
async def test_a_page_that_changed_hands_is_never_served(world: World, number: int) -> None:
    """The last page is never the first page of a chunk."""
    asked = offer(20)
    await world.prefill(asked)
    await world.tell("steal_page", **named(asked), number=number)
    with pytest.raises(StalePages, match="page .* was freed: its generation changed from"):
        await world.pull(asked)
    await world.check_clean()
    after = offer(9)
    running = world.prefill(after)
    _, pages = await world.pull(after)
    await running
    await world.check_bytes(after, pages)


@pytest.mark.parametrize("number", [0, -1])
async def test_a_page_that_changes_hands_once_it_was_sent_is_seen_by_the_seal(
    world: World, number: int
) -> None:
    """Every gather was correct when it ran, so only the seal can show the change. The first chunk
    has the first page; only later chunks have the last page."""
    asked = offer(20)
    await world.prefill(asked, step=10, seal=False)
    pulling = asyncio.create_task(world.pull(asked))
    await until(lambda: waits(world))
    await world.tell("steal_page", **named(asked), number=number)
    await world.tell("seal", **named(asked))
    with pytest.raises(StalePages, match=r"pages from index \d on changed owners: .* when sealed"):
        await pulling
    await world.check_clean(channels=1)


async def test_a_pull_that_is_over_holds_no_lease(world: World) -> None:
    """The pull releases its lease, which would otherwise expire a little later."""
    asked = offer(20)
    await world.prefill(asked)
    _, pages = await world.pull(asked)
    await world.sink.idle()
    report = await world.tell("report")
    assert not report["leases"] and report["asked"].count("release") == 1
    await world.check_bytes(asked, pages)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"epoch": 1}, RankLost, "the call is for epoch 1, but this rank is in epoch 2"),
        ({"protocol": 10}, LayoutMismatch, "protocol differs: 9 on the decode rank, 10"),
        (
            {"caches": ("dtype: f00",)},
            LayoutMismatch,
            "decode rank needs .*; the prefill rank has dtype: f00",
        ),
        ({"num_tokens": 21}, HandoverError, "sealed at 20 tokens, but 21 were offered"),
        ({"num_tokens": 19}, HandoverError, r"reported 20 computed tokens, .* 19 \(offered\)"),
    ],
)
async def test_an_offer_that_does_not_fit_is_refused_by_name(
    world: World, changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    asked = offer(20)
    await world.prefill(asked)
    with pytest.raises(error, match=text):
        await world.pull(replace(asked, **changed))
    if changed.keys() & {"epoch"}:
        await world.check_bytes(asked, (await world.pull(asked))[1])
    await world.check_clean()


async def test_another_attempt_finds_nothing_and_harms_nothing(world: World) -> None:
    asked = offer(20)
    late = replace(asked, identity=Identity(asked.identity.request_id))
    await world.prefill(asked)
    pulling = asyncio.create_task(world.pull(late))
    await until(lambda: waits(world))
    await world.check_bytes(asked, (await world.pull(asked))[1])
    with pytest.raises(HandoverError, match=r"no new tokens for 4\.0 s; .* prefill rank: False"):
        await pulling


async def test_another_layout_is_refused_by_field(world: World) -> None:
    narrow = Layout((LAYOUT.groups[0],), "bfloat16", "tiny")
    rank = Rank("narrow", 4, 10, narrow)
    sink = Sink(
        "narrow",
        1,
        TransferEndpoint(rank.caches, rank.engine, world.channel_factory, CONFIG, DEADLINES),
    )
    with pytest.raises(LayoutMismatch) as caught:
        await sink._link("p0", "p0", EPOCH, world.control()).ensure_channel()
    told = "the decode rank needs dtype: bfloat16; the prefill rank has dtype: float32"
    assert told in str(caught.value) and "main" not in str(caught.value)
    await sink.close()
    assert not any(sink.counts().values())
    rank.engine.stop()


async def test_cancelling_while_waiting_for_prefill_frees_everything(world: World) -> None:
    asked = offer(20)
    pulling = asyncio.create_task(world.pull(asked))
    await until(lambda: waits(world))
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    await world.sink.idle()
    await world.prefill(asked)
    await world.check_clean()


async def test_cancelling_on_the_wire_keeps_the_channel_and_writes_nothing(world: World) -> None:
    await world.sink._link("p0", "p0", EPOCH, world.control()).ensure_channel()
    channel = await world.sink._links["p0"].ensure_channel()
    await world.tell("hold_sends")
    asked = offer(40)
    running = world.prefill(asked)
    pulling = asyncio.create_task(world.pull(asked))
    await until(lambda: world.sink.counts()["staging"])
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert world.sink.counts()["staging"] >= 1, "a cancelled pull waits for its transfer"
    await world.tell("let_sends_go")
    await running
    await world.check_clean(channels=1)
    assert not any(cache.any() for cache in world.decode.layers()), "a late scatter"
    assert await world.sink._links["p0"].ensure_channel() == channel


async def test_a_failed_prefill_is_told_by_name(world: World) -> None:
    asked = offer(20)
    pulling = asyncio.create_task(world.pull(asked))
    await world.prefill(asked, seal=False)
    await world.tell("fail", **named(asked))
    with pytest.raises(HandoverError, match="the prompt was refused"):
        await pulling


async def test_a_pull_without_a_prefill_gives_up(world: World) -> None:
    with pytest.raises(HandoverError, match=r"no new tokens for 4\.0 s; .* prefill rank: False"):
        await world.pull(offer(8))


async def test_two_lives_of_one_owner(world: World) -> None:
    for epoch, error in ((EPOCH, None), (1, RankLost), (EPOCH, None)):
        asked = offer(8)
        await world.prefill(asked)
        if error is None:
            _, pages = await world.pull(asked)
            await world.check_bytes(asked, pages)
        else:
            with pytest.raises(error):
                await world.pull(replace(asked, epoch=epoch))
    await world.check_clean(channels=1)


@pytest.mark.parametrize("in_gather", [True, False])
async def test_death_of_prefill_in_a_pull_frees_the_decode_side(in_gather: bool) -> None:
    process = Process()
    async with over_process(process) as world:
        await world.sink._link("p0", "p0", EPOCH, world.control()).ensure_channel()
        if in_gather:
            await world.tell("die", in_gather=True)
            await world.prefill(offer_ := offer(40))
        else:
            offer_ = offer(40)
        pulling = asyncio.create_task(world.pull(offer_))
        if not in_gather:
            await until(lambda: waits(world))
            with pytest.raises(RankLost):
                await world.tell("die", in_gather=False)
        with pytest.raises((RankLost, HandoverError)):
            await pulling
        await world.sink.idle()
        counts = world.sink.counts()
        assert (counts["pulls"], counts["staging"], counts["tasks"]) == (0, 0, 0), counts
        world.decode.pool.check_integrity()
        assert world.decode.pool.num_free == world.decode.pool.num_pages - 1
    process.process.join(PATIENCE_S)
    assert process.process.exitcode == 9
