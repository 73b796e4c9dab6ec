"""The connection that a decode node's frames come over breaks; the node itself is well."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.driven.engines import greedy
from benchmarks.driven.exact import near_ties
from core.control import Control
from core.errors import NodeLost
from tests.gates import Gate, are_active
from tests.integration.test_lost_prefill import prompts
from tests.rig import rig
from tests.waiting import turns, until

SETS = ("kv.num_pages=300", "kv.page_size=16")


async def test_answers_go_on_exactly_once_the_frames_are_read_again(small_model: Path) -> None:
    async with rig(small_model, *SETS) as cluster:
        [decode] = cluster.decodes
        asked = [greedy(f"r{i}", ids, 60, ignore_eos=True) for i, ids in enumerate(prompts(4, 9))]
        for _ in range(2):
            cut_at = decode.engine.num_steps + 8
            running = [asyncio.create_task(cluster.complete(request)) for request in asked]
            await until(lambda cut_at=cut_at: decode.engine.num_steps >= cut_at)
            for writer in decode._server._connections.values():
                writer.transport.abort()
            for request, (ids, _, _) in zip(asked, await asyncio.gather(*running), strict=True):
                assert len(ids) == 60
                assert not near_ties(small_model, list(request.prompt_ids), ids)
        assert cluster.gateway.is_healthy() and len(decode._server._connections) == 1
        await cluster.check_empty()


class Asked:
    """A control that counts how often its rank has said how it is."""

    def __init__(self, control: Control) -> None:
        self.num_told = 0
        self._control = control

    async def call(self, method: str, payload: bytes) -> bytes:
        try:
            return await self._control.call(method, payload)
        finally:
            self.num_told += method == "status"


async def test_a_node_whose_engine_stopped_gets_no_requests(small_model: Path) -> None:
    async with rig(small_model, *SETS, "server.patience_s=0.2") as cluster:

        def step() -> None:
            raise RuntimeError("cosmic ray")

        [decode] = cluster.decodes
        decode.engine.step = step  # type: ignore[method-assign]
        handle = cluster.gateway.fleet.ranks[decode.spec.name]
        handle.control = asking = Asked(handle.control)
        with pytest.raises(NodeLost):
            await cluster.complete(greedy("r", prompts(1, 9)[0], 8))
        await until(lambda: asking.num_told)
        await turns()
        assert handle.is_out and not cluster.gateway.is_healthy(), "it says itself that it is dead"
        [(gang, epoch, _)] = cluster.members.reports
        assert (gang, epoch) == (decode.spec.gang, decode.spec.epoch)


async def test_rows_of_a_gateway_that_was_away_too_long_go_on_elsewhere(small_model: Path) -> None:
    """Its heartbeats stop for longer than a lease: the node drops its rows, and the first beat
    after that tells it, so that the answers go on from what has come."""
    async with rig(small_model, *SETS, "kv_transfer.lease_s=1", "decode.max_rows=4") as cluster:
        [decode] = cluster.decodes
        session, held = cluster.gateway.fleet.session, Gate(decode)
        asked = [greedy(f"r{i}", ids, 100, ignore_eos=True) for i, ids in enumerate(prompts(2, 9))]
        running = [asyncio.create_task(cluster.complete(request)) for request in asked]
        await until(lambda: are_active(decode, 2) and held.is_held, held.answer)
        assert len(before := decode.sessions.held(session)) == 2
        decode.sessions._renewed_at[session] -= 60
        sweeping = asyncio.create_task(decode._sweep())
        await until(sweeping.done, held.answer)
        assert not set(before) & set(decode.sessions.held(session))
        held.open()
        for request, (ids, _, _) in zip(asked, await asyncio.gather(*running), strict=True):
            assert len(ids) == 100
            assert not near_ties(small_model, list(request.prompt_ids), ids)
        assert cluster.gateway.is_healthy()
        await cluster.check_empty()
