"""Lifetimes of the parts of a hand-over's transport: chunks, idle channels, earlier epochs."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.control import Empty, Handler, InProcessControl, call_rank
from tandem.core.errors import HandoverError, RankLost, SequenceEnded
from tandem.core.schema import decode, unpack
from tandem.core.tasks import cancel_and_wait
from tandem.kv_transfer import managed_channel
from tandem.kv_transfer import messages as m
from tandem.kv_transfer.channel import create_channel_factory
from tandem.kv_transfer.endpoint import Deadlines
from tandem.kv_transfer.peer_link import MAX_CHUNKS_PER_LINK
from tests.integration.handover_peer import CONFIG, DEADLINE_S, DEADLINES, EPOCH, HOST, Prefill
from tests.integration.handover_world import World, offer, world_over
from tests.loopback import LoopbackChannels
from tests.waiting import PATIENCE_S, turns, until

WIRE_S = 0.5
"""The channel's deadline in these tests, shorter than waits that must not fail a pull."""


@asynccontextmanager
async def prefill_rank(
    deadlines: Deadlines = DEADLINES, lease_s: float = CONFIG.lease_s
) -> AsyncIterator[Prefill]:
    prefill = Prefill(create_channel_factory("gloo", HOST, WIRE_S), deadlines, lease_s)
    yield prefill
    await prefill.source.stop()
    assert not any(prefill.source.counts().values()), prefill.source.counts()
    prefill.engine.stop()


def decode_rank(
    prefill: Prefill, name: str = "", epoch: int = 1, deadlines: Deadlines = DEADLINES
) -> AbstractAsyncContextManager[World]:
    channel_factory = create_channel_factory("gloo", HOST, WIRE_S)
    return world_over(prefill.handle, channel_factory, name, epoch, deadlines)


def channel_threads() -> int:
    return sum(t.name.startswith("channel-") for t in threading.enumerate())


async def pull_and_check(world: World, num_tokens: int = 20, owner: str = "p0") -> None:
    await world.prefill(asked := offer(num_tokens, owner=owner))
    _, pages = await world.pull(asked)
    await world.check_bytes(asked, pages)


async def test_no_step_of_either_side_is_waited_for() -> None:
    """Both engine threads are in a step all the time. Neither step touches the copied pages."""
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(40))
        pool = world.decode.pool
        pages = await world.decode.engine.call(lambda: pool.allocate(pool.num_pages_for(40)))
        ends = threading.Event()
        steps = [engine.post(ends.wait) for engine in (prefill.engine, world.decode.engine)]
        try:
            pulled = await world.sink.pull(asked, world.control(), pages)
        finally:
            ends.set()
        assert pulled.stats.tokens == 40 and all(step.result(PATIENCE_S) for step in steps)
        await world.check_bytes(asked, pages)
        await world.check_clean(channels=1)


async def test_a_decode_rank_that_stands_still_does_not_stop_the_others() -> None:
    """The rank requests the maximum number of chunks in flight, and receives none."""
    async with prefill_rank(lease_s=PATIENCE_S) as prefill, AsyncExitStack() as stack:
        worlds = [await stack.enter_async_context(decode_rank(prefill)) for _ in range(3)]
        still, *others = worlds
        await pull_and_check(still)
        await still.prefill(asked := offer(30))
        managed_channel, channel = await still.sink._links["p0"].ensure_channel()
        chunks = [
            m.Send(
                asked.identity,
                "main",
                7 * i,
                7 * i + 7,
                managed_channel.nonce,
                channel.requested_chunks[-1] + 1 + i,
            )
            for i in range(MAX_CHUNKS_PER_LINK)
        ]
        asks = [
            call_rank(still.control(), "send", chunk, m.SendReply, PATIENCE_S) for chunk in chunks
        ]
        sent, *_ = await asyncio.gather(*asks, return_exceptions=True)
        assert isinstance(sent, m.SendReply), "it waits in staging, for as long as the wire does"
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(pull_and_check(w, 30) for w in others for _ in range(3)))
        await until(lambda: not prefill.source.counts()["staging"])
        channel.abort("as a pull does whose chunk did not come")
        managed_channel.drop("it failed")
        _, pages = await still.pull(asked)
        await still.check_bytes(asked, pages)
        for world in worlds:
            await world.check_clean(channels=3)


async def test_pulls_from_one_rank_hold_no_more_staging_than_their_link_has_places() -> None:
    """If that rank stopped, pulls from other ranks would still work."""
    async with prefill_rank(lease_s=PATIENCE_S) as prefill, decode_rank(prefill) as world:
        await pull_and_check(world)
        offers = [offer(30) for _ in range(3)]
        for asked in offers:
            await world.prefill(asked)
        prefill.may_gather.clear()
        pulls = [asyncio.create_task(world.pull(asked)) for asked in offers]
        await until(lambda: prefill.source.counts()["staging"] == MAX_CHUNKS_PER_LINK)
        await turns()
        staging = world.sink._endpoint.staging
        num_taken = staging.num_taken
        prefill.may_gather.set()
        assert num_taken == MAX_CHUNKS_PER_LINK < staging.num_buffers
        for asked, pull in zip(offers, pulls, strict=True):
            await world.check_bytes(asked, (await pull)[1])
        await world.check_clean(channels=1)


def first_send_late(prefill: Prefill, *, answers: bool) -> Handler:
    """Delay the first send, or its reply, until another send has been answered."""
    others, num_sends = asyncio.Event(), 0

    async def handle(epoch: int, method: str, payload: bytes) -> bytes:
        nonlocal num_sends
        num_sends, is_first = num_sends + (method == "send"), method == "send" and not num_sends
        if is_first and not answers:
            await others.wait()
        answer = await prefill.handle(epoch, method, payload)
        if is_first and answers:
            await others.wait()
        elif method == "send":
            others.set()
        return answer

    return handle


async def test_calls_that_overtake_one_another_bring_every_chunk() -> None:
    """This happens when the first send waits for a channel that exists when the next one
    arrives."""
    channel_factory = LoopbackChannels(DEADLINE_S)
    prefill = Prefill(channel_factory, lease_s=PATIENCE_S)
    async with world_over(first_send_late(prefill, answers=False), channel_factory) as world:
        await pull_and_check(world)
        await world.check_clean(channels=1)
    await prefill.source.stop()
    prefill.engine.stop()


async def test_answers_in_another_order_end_the_channel_and_no_chunk_is_taken_for_another() -> None:
    channel_factory = LoopbackChannels(DEADLINE_S)
    prefill = Prefill(channel_factory, lease_s=PATIENCE_S)
    async with world_over(first_send_late(prefill, answers=True), channel_factory) as world:
        await world.prefill(asked := offer(20))
        with pytest.raises(HandoverError, match=r"reply SendReply\(transfer_id=.* does not fit"):
            await world.pull(asked)
        await pull_and_check(world)
        await world.check_clean(channels=1)
    await prefill.source.stop()
    prefill.engine.stop()


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_send_that_comes_twice_sends_nothing_twice_and_harms_nobody(is_late: bool) -> None:
    """A repeated chunk would be taken for the next one. Gloo aborts a process whose receive buffer
    is too small."""
    channel_factory = LoopbackChannels(DEADLINE_S)
    prefill, nonces = Prefill(channel_factory, lease_s=PATIENCE_S), set()

    async def twice(epoch: int, method: str, payload: bytes) -> bytes:
        calls = [prefill.handle(epoch, method, payload) for _ in range(1 + (method == "send"))]
        first, *copies = [await c for c in calls] if is_late else await asyncio.gather(*calls)
        for copy in copies:
            nonces.add(unpack(m.Send, payload).nonce)
            with pytest.raises(HandoverError, match="was already requested"):
                decode(m.SendReply, copy)
        return first

    async with world_over(twice, channel_factory) as world:
        for num_tokens in (33, 20, 7):
            await pull_and_check(world, num_tokens)
        await world.check_clean(channels=1)
    assert len(nonces) == 1, "all of them on the first channel"
    await prefill.source.stop()
    prefill.engine.stop()


async def test_a_send_that_comes_again_after_many_is_refused() -> None:
    channel_factory, calls = LoopbackChannels(DEADLINE_S), list[bytes]()
    prefill = Prefill(channel_factory, lease_s=PATIENCE_S)

    async def handle(epoch: int, method: str, payload: bytes) -> bytes:
        calls.extend([payload] if method == "send" else [])
        return await prefill.handle(epoch, method, payload)

    async with world_over(handle, channel_factory) as world:
        while len(calls) < 100:
            await pull_and_check(world)
        for early in (calls[0], calls[20], calls[-1]):
            again = await prefill.handle(EPOCH, "send", early)
            with pytest.raises(HandoverError, match="was already requested"):
                decode(m.SendReply, again)
        await pull_and_check(world)
        await world.check_clean(channels=1)
    await prefill.source.stop()
    prefill.engine.stop()


async def test_a_pull_whose_identity_ends_while_a_chunk_is_read_fails_by_name() -> None:
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        channel = await world.sink._link("p0", "p0", EPOCH, world.control()).ensure_channel()
        await world.prefill(asked := offer(20))
        prefill.may_gather.clear()
        pulling = asyncio.create_task(world.pull(asked))
        await until(lambda: prefill.source.counts()["staging"] == MAX_CHUNKS_PER_LINK)
        release = m.Release(asked.identity, "cancelled")
        await call_rank(world.control(), "release", release, Empty, 5.0)
        prefill.may_gather.set()
        with pytest.raises(SequenceEnded, match="released by the decode rank: cancelled"):
            await pulling
        await world.check_clean(channels=1)
        assert await world.sink._links["p0"].ensure_channel() == channel, (
            "others' chunks may be on it"
        )
        await pull_and_check(world)


async def test_cancelling_a_pull_during_its_gather_frees_everything() -> None:
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(20))
        prefill.may_gather.clear()
        pulling = asyncio.create_task(world.pull(asked))
        await until(lambda: prefill.source.counts()["staging"] >= 1)
        pulling.cancel()
        prefill.may_gather.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await world.check_clean(channels=1)
        await pull_and_check(world)


async def test_who_gives_up_while_a_channel_is_built_takes_it_from_nobody() -> None:
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        link = world.sink._link("p0", "p0", EPOCH, world.control())
        first, second = (asyncio.create_task(link.ensure_channel()) for _ in range(2))
        await turns(1)
        assert link.has_channel and not first.done()
        await cancel_and_wait(first)
        _, channel = await second
        assert channel.failure is None
        await pull_and_check(world)
        await world.check_clean(channels=1)


async def test_idle_channels_are_dropped_at_both_ends_and_built_again() -> None:
    deadlines = replace(DEADLINES, idle_s=0.4)
    async with (
        prefill_rank(deadlines) as prefill,
        decode_rank(prefill, deadlines=deadlines) as world,
    ):
        for _ in range(2):
            await pull_and_check(world)
            assert prefill.source.counts()["channels"] == 1
            await until(lambda: not world.sink._links)
            await until(lambda: not prefill.source.counts()["channels"])
            await until(lambda: not channel_threads())


async def test_a_channel_is_idle_since_its_last_use_and_not_since_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        monkeypatch.setattr(managed_channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
        await pull_and_check(world)
        now[0] = 100.0
        await pull_and_check(world)
        accepted = prefill.source._channels._accepted.values()
        ends = [world.sink._links["p0"]._managed, *(end for _, end in accepted)]
        assert len(ends) == 2
        for end in ends:
            assert end is not None and not end.is_idle(50.0)
        now[0] = 200.0
        assert all(end is not None and end.is_idle(50.0) for end in ends)
        monkeypatch.undo()


async def test_a_pull_that_is_cancelled_while_a_chunk_is_copied_ends_after_the_copy() -> None:
    """The pages of the pull are reused as soon as it ends."""
    copying, may_copy = threading.Event(), threading.Event()
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        scatter = world.decode.caches.scatter

        def held(*given: Any) -> None:
            copying.set()
            assert may_copy.wait(PATIENCE_S)
            scatter(*given)

        world.decode.caches.scatter = held  # type: ignore[method-assign]
        await world.prefill(asked := offer(20))
        pages = await world.decode.engine.call(lambda: world.decode.pool.allocate(5))
        pulling = asyncio.create_task(world.sink.pull(asked, world.control(), pages))
        await until(copying.is_set)
        pulling.cancel()
        await turns(50)
        assert not pulling.done()
        may_copy.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await world.decode.engine.call(lambda: world.decode.pool.release(pages))
        await world.check_clean(channels=1)


async def test_a_pull_that_waits_longer_than_a_channel_idles_goes_on() -> None:
    deadlines = replace(DEADLINES, idle_s=0.3)
    async with (
        prefill_rank(deadlines) as prefill,
        decode_rank(prefill, deadlines=deadlines) as world,
    ):
        running = world.prefill(asked := offer(20), step=10, delay_s=1.0)
        _, pages = await world.pull(asked)
        await running
        await world.check_bytes(asked, pages)


async def test_prefill_drops_the_channel_of_a_decode_rank_that_died() -> None:
    """No peer closes the channel; prefill's idle timeout does."""
    deadlines = replace(DEADLINES, idle_s=0.3)
    async with prefill_rank(deadlines) as prefill, decode_rank(prefill) as world:
        await pull_and_check(world)
        began = time.monotonic()
        await until(lambda: not prefill.source.counts()["channels"])
        # time: of idling, which may be longer
        assert time.monotonic() - began > deadlines.idle_s, "not before the other end does"


async def test_a_later_life_of_a_decode_rank_replaces_its_channel() -> None:
    async with prefill_rank() as prefill, AsyncExitStack() as stack:
        for epoch in (3, 4, 11):
            life = decode_rank(prefill, "decode-0.1", epoch)
            world = await stack.enter_async_context(life)
            await pull_and_check(world)
            assert prefill.source.counts()["channels"] == 1, "one per life"
        other = await stack.enter_async_context(decode_rank(prefill, "decode-0.0", 11))
        await pull_and_check(other)
        assert prefill.source.counts()["channels"] == 2, "another rank of the same life"
        late = await stack.enter_async_context(decode_rank(prefill, "decode-0.1", 4))
        with pytest.raises(
            HandoverError,
            match="decode-0.1: requested a channel for epoch 4 after one for the later epoch 11",
        ):
            await late.sink._link("p0", "p0", EPOCH, late.control()).ensure_channel()
        await pull_and_check(world)


async def test_a_late_offer_of_an_earlier_life_leaves_the_link_to_the_later_one_alone() -> None:
    """Such an offer comes from a gateway with an outdated snapshot, during pulls from the later
    epoch."""
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(40))
        prefill.may_gather.clear()
        pulling = asyncio.create_task(world.pull(asked))
        await until(lambda: prefill.source.counts()["staging"] > 0)
        late = offer(20, epoch=EPOCH - 1)
        with pytest.raises(RankLost, match=f"epoch {EPOCH - 1} .* {EPOCH}"):
            await world.pull(late)
        prefill.may_gather.set()
        _, pages = await pulling
        await world.check_bytes(asked, pages)
        await world.check_clean(channels=1)


async def test_a_later_life_of_a_prefill_rank_replaces_the_link() -> None:
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(prefill_rank()) for _ in range(2)]
        world = await stack.enter_async_context(decode_rank(lives[0]))
        for number, life in enumerate(lives):
            epoch = EPOCH + number

            async def handle(
                epoch: int, method: str, payload: bytes, life: Prefill = life
            ) -> bytes:
                return await life.handle(EPOCH, method, payload)

            control = InProcessControl(handle, epoch)
            await world.sink._link(
                f"prefill-0.{epoch}.0", "prefill-0.0", epoch, control
            ).ensure_channel()
            assert world.sink.counts()["channels"] == len(world.sink._links) == 1
        await until(lambda: not lives[0].source.counts()["channels"])
        assert lives[1].source.counts()["channels"] == 1
