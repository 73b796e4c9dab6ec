"""A backend that fails or hangs at each of its calls, at either end, under whole pulls."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.errors import HandoverError
from kv_transfer.side import Deadlines
from tests.faulty import WARM, Fault, FaultyChannels
from tests.integration.handover_peer import EPOCH, HOST, Prefill
from tests.integration.handover_world import World, offer, world_over
from tests.waiting import PATIENCE_S, until

TIMEOUT_S = 1.0
DEADLINES = Deadlines(wait_s=0.5, call_s=3.0, progress_s=10.0)
IN_SETUP = [
    ("store", 0), ("join", 0), ("send", 0), ("recv", 0), ("wait", 0), ("wait", 1),
]  # fmt: skip
LATER = [("wait", WARM), ("abort", WARM), ("destroy", WARM)]
FAULTS = [("p", *fault) for fault in [*IN_SETUP, ("send", WARM), *LATER]]
FAULTS += [("d", *fault) for fault in [*IN_SETUP, ("recv", WARM), *LATER]]


@asynccontextmanager
async def faulty_world() -> AsyncIterator[tuple[World, Prefill, dict[str, FaultyChannels]]]:
    makers = {side: FaultyChannels(HOST, TIMEOUT_S) for side in "pd"}
    prefill = Prefill(makers["p"], DEADLINES)
    async with world_over(prefill.handle, makers["d"], deadlines=DEADLINES) as world:
        yield world, prefill, makers
    await prefill.source.stop()
    assert not any(prefill.source.counts().values()), prefill.source.counts()
    prefill.engine.stop()
    left = [t for t in threading.enumerate() if t.name.startswith(("channel-", "kv-"))]
    for thread in left:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in left), left


async def settle(world: World, prefill: Prefill) -> None:
    """Until nothing but channels is held on either side."""

    def is_settled() -> bool:
        counts = world.sink.counts(), prefill.source.counts()
        return all(one | {"channels": 0} == dict.fromkeys(one, 0) for one in counts)

    await until(is_settled)
    world.sink.check_integrity()
    prefill.source.check_integrity()


@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
@pytest.mark.parametrize(("end", "call", "after"), FAULTS)
async def test_a_pull_fails_by_name_and_the_next_one_works(
    end: str, call: str, after: int, hangs: bool
) -> None:
    async with faulty_world() as (world, prefill, makers):
        fault = makers[end].faulty.fault = Fault(call, hangs, after)
        await world.prefill(failing := offer(20))
        with pytest.raises(HandoverError):
            await world.pull(failing)
        assert fault.num_met, "the fault was not met"
        assert threading.current_thread() not in fault.met_on, "the loop waits for a backend's call"
        if (call, hangs) == ("destroy", True):
            held = world.sink if end == "d" else prefill.source
            assert held.counts()["staging"], "staging was freed that the backend may still touch"
        fault.over()
        await settle(world, prefill)
        await world.prefill(asked := offer(20))
        _, pages = await world.pull(asked)
        await world.check_bytes(asked, pages)
        await world.check_clean(channels=1)


@pytest.mark.parametrize("end", ["p", "d"])
async def test_set_up_that_hangs_is_abandoned_and_leaves_nothing_registered(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with faulty_world() as (world, prefill, makers):
        fault = makers[end].faulty.fault = Fault("join", hangs=True)
        for _ in range(2):
            with pytest.raises(HandoverError):
                await world.sink._link("p0", "p0", EPOCH, world.control()).ready()
        await settle(world, prefill)
        assert prefill.source.counts()["channels"] == world.sink.counts()["channels"] == 0
        assert "its thread is abandoned" in caplog.text
        fault.over()


@pytest.mark.parametrize("end", ["p", "d"])
async def test_a_channel_that_never_ends_keeps_its_staging_and_says_so(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Others go on in what staging is left."""
    async with faulty_world() as (world, prefill, makers):
        fault = makers[end].faulty.fault = Fault("destroy", hangs=True)
        await world.prefill(failing := offer(20))
        with pytest.raises(HandoverError):
            await world.pull(failing)
        makers[end].faulty.fault = Fault()
        # The chunk behind the one that failed may have begun a channel, with the same fault.
        world.sink._links["p0"].drop("it is faulty")
        await world.prefill(asked := offer(20))
        _, pages = await world.pull(asked)
        await world.check_bytes(asked, pages)
        await world.sink.idle()
        await prefill.source.idle()
        held = world.sink if end == "d" else prefill.source
        assert held.counts()["staging"] == 1
        await until(lambda: "its staging stays in quarantine" in caplog.text)
        fault.over()
        await settle(world, prefill)
