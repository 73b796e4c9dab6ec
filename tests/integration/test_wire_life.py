"""How long the parts of a hand-over's wire live: gathered chunks, idle channels, earlier lives."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from core.control import Done, InProcessControl, ask
from core.errors import HandoverError
from kv_transfer import messages as m
from kv_transfer.channel import make_channels
from kv_transfer.side import Deadlines
from tests.integration.handover_peer import CONFIG, DEADLINES, EPOCH, HOST, Prefill
from tests.integration.handover_world import World, offer, world_over

WIRE_S = 0.5
"""The channel's own deadline here: shorter than what must not fail a pull."""


@asynccontextmanager
async def prefill_rank(deadlines: Deadlines = DEADLINES) -> AsyncIterator[Prefill]:
    prefill = Prefill(make_channels("gloo", HOST, WIRE_S), deadlines)
    yield prefill
    await prefill.source.stop()
    assert not any(prefill.source.counts().values()), prefill.source.counts()
    prefill.engine.stop()


def decode_rank(
    prefill: Prefill, name: str = "", epoch: int = 1, deadlines: Deadlines = DEADLINES
) -> AbstractAsyncContextManager[World]:
    maker = make_channels("gloo", HOST, WIRE_S)
    return world_over(prefill.handle, maker, name, epoch, deadlines)


async def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.02)


def channel_threads() -> int:
    return sum(t.name.startswith("channel-") for t in threading.enumerate())


async def pull_and_check(world: World, num_tokens: int = 20, owner: str = "p0") -> None:
    await world.prefill(asked := offer(num_tokens, owner=owner))
    _, pages = await world.pull(asked)
    await world.check_bytes(asked, pages)


async def test_a_step_longer_than_the_wires_deadline_fails_no_pull() -> None:
    """The gather waits for prefill's step; the wire's deadline does not run meanwhile."""
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.sink._link("p0", "p0", EPOCH, world.control()).ready()
        channel = await world.sink._links["p0"].ready()
        await world.prefill(asked := offer(9))
        await world.tell("slow_gather", delay_s=2 * WIRE_S)
        pulling = asyncio.create_task(world.pull(asked))
        await asyncio.sleep(WIRE_S)
        assert not world.sink.counts()["staging"], "a receive is posted that P cannot fill yet"
        _, pages = await pulling
        await world.check_bytes(asked, pages)
        assert await world.sink._links["p0"].ready() == channel
        await world.check_clean(channels=1)


async def test_the_next_chunk_is_gathered_while_one_is_on_the_wire() -> None:
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(40))
        await world.tell("slow_send", delay_s=0.2)
        pulling = asyncio.create_task(world.pull(asked))
        await until(lambda: prefill.asked.count("send") == 1)
        await until(lambda: prefill.asked.count("gather") > 1)
        assert prefill.asked.count("send") == 1, "the second gather waited for the wire"
        await world.tell("slow_send", delay_s=0.0)
        _, pages = await pulling
        await world.check_bytes(asked, pages)
        await world.check_clean(channels=1)


async def test_a_decode_rank_that_stands_still_does_not_stop_the_others() -> None:
    """It has gathered what it never sends for; staging of four chunks, many pulls beside it."""
    async with prefill_rank() as prefill, AsyncExitStack() as stack:
        worlds = [await stack.enter_async_context(decode_rank(prefill)) for _ in range(3)]
        still, *others = worlds
        assert prefill.source._side.staging.num_buffers == 4
        await pull_and_check(still)
        link = still.sink._links["p0"]
        await link.lock.acquire()  # whoever holds it stands still
        stuck = [offer(30) for _ in range(3)]
        for asked in stuck:
            await still.prefill(asked)
        standing = [asyncio.create_task(still.pull(asked)) for asked in stuck]
        await until(lambda: prefill.source.counts()["staging"] == 2)
        async with asyncio.timeout(20):
            for _ in range(2):
                await asyncio.gather(*(pull_and_check(w, 30) for w in others for _ in range(3)))
        assert prefill.source.counts()["staging"] == 2 and not any(t.done() for t in standing)
        link.lock.release()
        for asked, task in zip(stuck, standing, strict=True):
            await still.check_bytes(asked, (await task)[1])
        for world in worlds:
            await world.check_clean(channels=3)


async def gather(world: World, asked: m.Offer, ticket: int = 0) -> m.Gathered:
    ask_for = m.Gather(asked.identity, "d", ticket, "main", 0, 7)
    return await ask(world.control(), "gather", ask_for, m.Gathered, 5.0)


@pytest.mark.parametrize("end", ["release", "lease", "deadline"])
async def test_a_chunk_that_is_never_sent_is_freed(end: str) -> None:
    deadlines = replace(DEADLINES, gathered_s=0.3 if end == "deadline" else 60.0)
    async with prefill_rank(deadlines) as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(20))
        identity, control = asked.identity, world.control()
        for ticket in range(2):
            await gather(world, asked, ticket)
        assert prefill.source.counts()["staging"] == 2
        if end == "release":
            await ask(control, "release", m.Release(identity, "done"), Done, 5.0)
        if end != "deadline":
            await until(lambda: not prefill.source.counts()["staging"], 2 * CONFIG.lease_s)
            return
        for _ in range(4):
            await ask(control, "renew", m.Renew(identity), Done, 5.0)
            await asyncio.sleep(0.2)
        assert not prefill.source.counts()["staging"] and prefill.source.counts()["leases"]
        await ask(control, "release", m.Release(identity, "done"), Done, 5.0)


async def test_a_chunk_whose_identity_ends_during_the_gather_is_freed() -> None:
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(20))
        await world.tell("slow_gather", delay_s=0.3)
        gathering = asyncio.create_task(gather(world, asked))
        await until(lambda: prefill.source.counts()["staging"] == 1)
        release = m.Release(asked.identity, "cancelled")
        await ask(world.control(), "release", release, Done, 5.0)
        with pytest.raises(HandoverError, match="released: cancelled"):
            await gathering
        assert not prefill.source.counts()["staging"]
        await world.check_clean()


async def test_cancelling_a_pull_during_its_gather_frees_everything() -> None:
    async with prefill_rank() as prefill, decode_rank(prefill) as world:
        await world.prefill(asked := offer(20))
        await world.tell("slow_gather", delay_s=0.3)
        pulling = asyncio.create_task(world.pull(asked))
        await until(lambda: prefill.source.counts()["staging"] >= 1)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await world.check_clean(channels=1)
        await pull_and_check(world)


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
    """By its own clock: nobody hangs up."""
    deadlines = replace(DEADLINES, idle_s=0.3)
    async with prefill_rank(deadlines) as prefill, decode_rank(prefill) as world:
        await pull_and_check(world)
        began = time.monotonic()
        await until(lambda: not prefill.source.counts()["channels"])
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
        with pytest.raises(HandoverError, match="decode-0.1: epoch 4 after 11"):
            await late.sink._link("p0", "p0", EPOCH, late.control()).ready()
        await pull_and_check(world)


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
            await world.sink._link(f"prefill-0.{epoch}.0", "prefill-0.0", epoch, control).ready()
            assert world.sink.counts()["channels"] == len(world.sink._links) == 1
        await until(lambda: not lives[0].source.counts()["channels"])
        assert lives[1].source.counts()["channels"] == 1
