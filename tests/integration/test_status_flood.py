"""GetStatus is answered from heartbeats: a rank answers one heartbeat for any number of clients."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from benchmarks.harness.engines import greedy
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway import fleet as fleets
from tandem.cluster.gateway import frame_reader, handles
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tandem.core.config import TINY_MODEL
from tandem.core.control import Control
from tandem.core.info import SERVING
from tests.rig import Rig, rig
from tests.waiting import PATIENCE_S, turns

SETS = "kv.num_pages=100", "server.address=127.0.0.1:0", "kv_transfer.lease_s=3600"
NUM_CALLS = 200


class Counted:
    """Counts the calls of a rank's control connection by method."""

    def __init__(self, control: Control, asked: Counter[str]) -> None:
        self._control, self._asked = control, asked

    async def call(self, method: str, payload: bytes) -> bytes:
        self._asked[method] += 1
        return await self._control.call(method, payload)


def count_questions(cluster: Rig) -> Counter[str]:
    """Count control calls by method, heartbeats of decode ranks, and work posted to engine
    threads."""
    asked = Counter[str]()
    for handle in cluster.gateway.fleet.ranks.values():
        handle.control = Counted(handle.control, asked)
    [decode], [prefill] = cluster.decodes, cluster.prefills
    beat = decode.frames.on_heartbeat
    decode.frames.on_heartbeat = lambda session: (asked.update(["frame"]), beat(session))[1]  # type: ignore[method-assign]
    for rank in (decode, prefill):
        post = rank.loop.post
        rank.loop.post = lambda work, post=post: (asked.update(["turn"]), post(work))[1]  # type: ignore[method-assign]
    return asked


async def test_many_calls_cost_a_rank_one_heartbeat_and_its_engine_nothing(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "MAX_HEARTBEAT_PERIOD_S", 10 * PATIENCE_S)
    async with rig(small_model, *SETS) as cluster, Server(cluster.config) as server:
        gateway = cluster.gateway
        await server.attach(gateway)
        await gateway.status(0)
        asked = count_questions(cluster)
        statuses = await asyncio.gather(*(gateway.status(0) for _ in range(NUM_CALLS)))
        assert {status.state for status in statuses} == {SERVING}
        assert asked == {"heartbeat": 1, "frame": 1}, "one heartbeat of each rank for all of them"
        asked.clear()
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = rpc.InferenceStub(channel)
            calls = [stub.GetStatus(pb.GetStatusRequest()) for _ in range(NUM_CALLS)]
            for answer in await asyncio.gather(*calls):
                assert answer.state == pb.Status.SERVING
                assert [rank.alive for rank in answer.ranks] == [True, True]
        assert asked["turn"] == 0 and max(asked.values()) < NUM_CALLS / 4, asked


async def test_a_status_tells_of_what_was_done_before_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regular heartbeats are rare here. A status call brings the next heartbeat forward, to
    MIN_HEARTBEAT_PERIOD_S after the last one at the earliest."""
    monkeypatch.setattr(fleets, "MAX_HEARTBEAT_PERIOD_S", 10 * PATIENCE_S)
    async with rig(TINY_MODEL, *SETS) as cluster:
        now = asyncio.get_running_loop().time
        for i in range(3):
            began_at = now()
            tokens, _, _ = await cluster.complete(greedy(f"r{i}", [5, 6, 7], 4, ignore_eos=True))
            ranks = {rank.kind: rank for rank in (await cluster.gateway.status(0)).ranks}
            [decode], [prefill] = cluster.decodes, cluster.prefills
            assert len(tokens) == 4
            assert ranks["decode"].counters["num_steps"] == decode.engine.num_steps
            assert ranks["prefill"].counters["num_steps"] == prefill.engine.num_steps
            assert ranks["decode"].max_tokens == decode.pool.max_tokens
            assert ranks["decode"].process_epoch == decode.spec.epoch
            name = decode._parts.loaded.kernels.name
            assert ranks["decode"].kernels == f"{name}, {decode.engine.programs.exec_mode_status}"
            assert ranks["prefill"].kernels == name
            await cluster.gateway.status(0)
            # time: the lower bound is what is tested, and a slow machine only adds to it
            assert now() - began_at >= frame_reader.MIN_HEARTBEAT_PERIOD_S


async def test_a_rank_that_answers_no_heartbeat_is_shown_without_figures(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status call waits for the rank for a bounded time, and not at all once the rank is lost."""
    monkeypatch.setattr(handles, "STATUS_TIMEOUT_S", PATIENCE_S)
    async with rig(small_model, *SETS) as cluster:
        [decode] = cluster.decodes
        handle = cluster.gateway.fleet.ranks[decode.spec.epoch_name]
        assert (await handle.status()).max_tokens == decode.pool.max_tokens
        decode.frames.on_heartbeat = lambda session: None  # type: ignore[method-assign]
        with monkeypatch.context() as at_once:
            at_once.setattr(handles, "STATUS_TIMEOUT_S", 0.0)
            late = await handle.status()
        assert not late.alive and late.max_tokens == 0
        waiting = asyncio.create_task(handle.status())
        await turns()
        handle.liveness.mark_lost(RuntimeError("it died"))
        for status in (await waiting, await handle.status()):
            assert (status.name, status.alive) == (decode.spec.label, False)
