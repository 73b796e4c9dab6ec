"""Whole pulls over a backend that fails or hangs in each of its calls, at either end."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.engines import greedy
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.core.config import TandemConfig
from tandem.core.errors import HandoverError
from tandem.kv_transfer.endpoint import Deadlines, TransferEndpoint
from tandem.kv_transfer.peer_link import MAX_CHUNKS_PER_LINK
from tandem.runtime import parts
from tests.faulty import WARM, Fault, FaultyChannels, faulty_client
from tests.integration.handover_peer import EPOCH, HOST, Prefill
from tests.integration.handover_world import World, offer, world_over
from tests.integration.test_lost_prefill import prompts
from tests.rig import rig
from tests.waiting import until

TIMEOUT_S = 1.0
DEADLINES = Deadlines(wait_s=0.5, call_s=3.0, progress_s=10.0)
IN_SETUP = [
    ("store", 0), ("join", 0), ("send", 0), ("recv", 0), ("wait", 0), ("wait", 1),
]  # fmt: skip
LATER = [("wait", WARM), ("abort", WARM), ("destroy", WARM)]
FAULTS = [("p", *fault) for fault in [*IN_SETUP, ("send", WARM), *LATER]]
FAULTS += [("d", *fault) for fault in [*IN_SETUP, ("recv", WARM), *LATER]]


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kv_transfer.channel.store_client", faulty_client)


@asynccontextmanager
async def faulty_world(
    deadlines: Deadlines = DEADLINES,
) -> AsyncIterator[tuple[World, Prefill, dict[str, FaultyChannels]]]:
    makers = {side: FaultyChannels(HOST, TIMEOUT_S) for side in "pd"}
    prefill = Prefill(makers["p"], deadlines)
    async with world_over(prefill.handle, makers["d"], deadlines=deadlines) as world:
        yield world, prefill, makers
    await prefill.source.stop()
    assert not any(prefill.source.counts().values()), prefill.source.counts()
    prefill.engine.stop()
    names = "channel-", "kv-"  # one may just be starting, and cannot be joined
    await until(lambda: not any(t.name.startswith(names) for t in threading.enumerate()))


def is_settled(world: World, prefill: Prefill) -> bool:
    """Whether neither end holds anything except channels."""
    counts = world.sink.counts(), prefill.source.counts()
    return all(one | {"channels": 0} == dict.fromkeys(one, 0) for one in counts)


async def settle(world: World, prefill: Prefill) -> None:
    await until(lambda: is_settled(world, prefill))
    world.sink._endpoint.staging.check_integrity()
    prefill.source._endpoint.staging.check_integrity()


async def fail_by(fault: Fault, world: World, prefill: Prefill) -> None:
    """Run pulls that fail, the last one by the fault. On a busy machine a pull may miss the
    fault."""
    while not fault.num_met:
        await world.prefill(failing := offer(20))
        with pytest.raises(HandoverError):
            await world.pull(failing)
        await until(lambda: fault.num_met or is_settled(world, prefill))


@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
@pytest.mark.parametrize(("end", "call", "after"), FAULTS)
async def test_a_pull_fails_by_name_and_the_next_one_works(
    end: str, call: str, after: int, hangs: bool
) -> None:
    async with faulty_world() as (world, prefill, makers):
        fault = makers[end].faulty.fault = Fault(call, hangs, after)
        await fail_by(fault, world, prefill)
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
                await world.sink._link("p0", "p0", EPOCH, world.control()).ensure_channel()
        await settle(world, prefill)
        assert prefill.source.counts()["channels"] == world.sink.counts()["channels"] == 0
        assert "its thread is abandoned" in caplog.text
        fault.over()


@pytest.mark.parametrize("end", ["p", "d"])
async def test_a_channel_that_never_ends_keeps_its_staging_and_says_so(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other pulls continue in the remaining staging."""
    async with faulty_world() as (world, prefill, makers):
        fault = makers[end].faulty.fault = Fault("destroy", hangs=True)
        # A chunk for each group. Losing more staging than that could leave too little for the rest.
        await world.prefill(failing := offer(2))
        with pytest.raises(HandoverError):
            await world.pull(failing)
        makers[end].faulty.fault = Fault()
        # The chunk after the failed one may have opened a channel with the same fault.
        world.sink._links["p0"].drop("it is faulty")
        await world.prefill(asked := offer(20))
        _, pages = await world.pull(asked)
        await world.check_bytes(asked, pages)
        await world.sink.idle()
        await prefill.source.idle()
        held = world.sink if end == "d" else prefill.source
        assert 1 <= held.counts()["staging"] <= MAX_CHUNKS_PER_LINK
        await until(lambda: "its buffers stay in quarantine" in caplog.text)
        fault.over()
        await settle(world, prefill)


@pytest.mark.parametrize("end", ["p", "d"])
async def test_a_rank_most_of_whose_staging_stays_in_quarantine_ends(end: str) -> None:
    """Quarantine of half of the staging never ends a rank."""
    deadlines = replace(DEADLINES, idle_s=0.4, quarantine_s=0.2)
    async with faulty_world(deadlines) as (world, prefill, makers):
        side = (world.sink if end == "d" else prefill.source)._endpoint
        engine, fault = side.engine, Fault("destroy", hangs=True)
        makers[end].faulty.fault = fault
        num_half, num_lost = side.staging.num_buffers // 2, side.staging.num_quarantined
        while (num_before := num_lost()) <= num_half:
            await sweeps(side)
            assert engine.failure is None, f"{num_before} of {2 * num_half} lost"
            await world.prefill(failing := offer(2))
            with pytest.raises(HandoverError):
                await world.pull(failing)
            await until(lambda: num_before < num_lost() == num_lost(0.2))  # noqa: B023
        await until(lambda: engine.failure is not None)
        assert f"{num_lost()} staging buffers are stuck" in str(engine.failure)
        fault.over()
        await until(lambda: not side.staging.num_quarantined())


async def sweeps(side: TransferEndpoint) -> None:
    """Sweep staging three times."""
    looks, look = asyncio.Semaphore(0), side.check_staging

    def counted() -> None:
        look()
        looks.release()

    side.check_staging = counted  # type: ignore[method-assign]
    for _ in range(3):
        await looks.acquire()
    del side.check_staging


async def test_staging_in_quarantine_is_told_in_the_status_of_its_rank(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(config: TandemConfig, kind: str, host: str) -> FaultyChannels:
        return FaultyChannels(host, TIMEOUT_S)

    monkeypatch.setattr(parts, "channel_factory_from_config", faulty)
    sets = ("server.address=127.0.0.1:0", "kv.num_pages=60", "kv.page_size=16")
    async with (
        rig(small_model, *sets) as cluster,
        Server(cluster.config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        await server.attach(cluster.gateway)
        stub, [decode] = rpc.InferenceStub(channel), cluster.decodes

        async def told() -> int:
            status = await stub.GetStatus(pb.GetStatusRequest())
            return {node.kind: node.num_quarantined for node in status.ranks}["decode"]

        assert await told() == 0
        fault = decode.kv_receiver._endpoint.channel_factory.faulty.fault  # type: ignore[attr-defined]
        fault.call, fault.hangs = "destroy", True
        # Each attempt yields one token, from prefill.
        await cluster.complete(greedy("r", prompts(1, 9)[0], 2, ignore_eos=True))
        assert await told() > 0
        fault.over()
        await until(lambda: not decode.kv_receiver.counts()["quarantined"])
        assert await told() == 0
        await cluster.check_empty()
