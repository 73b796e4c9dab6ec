"""The frame or call connection of a gateway to a decode node breaks; the node itself is healthy."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from tandem.core.control import Control
from tandem.core.errors import RankLost
from tests.gates import Gate, are_active
from tests.integration.test_lost_prefill import prompts
from tests.rig import Rig, rig
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


async def test_a_node_whose_engine_stopped_gets_no_requests(small_model: Path) -> None:
    async with rig(small_model, *SETS, "server.recovery_timeout_s=0.2") as cluster:

        def step() -> None:
            raise RuntimeError("cosmic ray")

        [decode] = cluster.decodes
        decode.engine.step = step  # type: ignore[method-assign]
        handle = cluster.gateway.fleet.ranks[decode.spec.epoch_name]
        beats, beat = list[int](), decode.frames.on_heartbeat
        decode.frames.on_heartbeat = lambda session: (beats.append(session), beat(session))[1]  # type: ignore[method-assign]
        with pytest.raises(RankLost):
            await cluster.complete(greedy("r", prompts(1, 9)[0], 8))
        num_before = len(beats)
        await until(lambda: len(beats) > num_before + 1)
        await turns()
        assert handle.liveness.is_out and not cluster.gateway.is_healthy(), (
            "it says itself that it is dead"
        )
        [(gang, epoch, _)] = cluster.members.reports
        assert (gang, epoch) == (decode.spec.gang, decode.spec.epoch)


async def test_rows_of_a_gateway_that_was_away_too_long_go_on_elsewhere(small_model: Path) -> None:
    """The gateway's heartbeats stop for longer than a lease, so the node drops its rows.

    The next heartbeat reports that. The answers then migrate with the tokens received so far.
    """
    async with rig(small_model, *SETS, "kv_transfer.lease_s=1", "decode.max_num_seqs=4") as cluster:
        [decode] = cluster.decodes
        session, held = cluster.gateway.fleet.session, Gate(decode)
        asked = [greedy(f"r{i}", ids, 100, ignore_eos=True) for i, ids in enumerate(prompts(2, 9))]
        running = [asyncio.create_task(cluster.complete(request)) for request in asked]
        await until(lambda: are_active(decode, 2) and held.is_held, held.answer)
        assert len(before := decode.sessions.sequences_of(session)) == 2
        decode.sessions._renewed_at[session] -= 60
        sweeping = asyncio.create_task(decode._sweep())
        await until(sweeping.done, held.answer)
        assert not set(before) & set(decode.sessions.sequences_of(session))
        held.open()
        for request, (ids, _, _) in zip(asked, await asyncio.gather(*running), strict=True):
            assert len(ids) == 100
            assert not near_ties(small_model, list(request.prompt_ids), ids)
        assert cluster.gateway.is_healthy()
        await cluster.check_empty()


class Broken:
    """A connection for calls that loses some messages; frames have a separate connection.

    The replies to ``num_grants`` grants are lost, and ``num_aborts`` whole aborts.
    """

    def __init__(self, control: Control, num_grants: int, num_aborts: int) -> None:
        self.num_lost = {"grant": num_grants, "abort": num_aborts}
        self._control = control

    async def call(self, method: str, payload: bytes) -> bytes:
        is_lost = self.num_lost.get(method, 0) > 0
        answer = b"" if is_lost and method == "abort" else await self._control.call(method, payload)
        if is_lost:
            self.num_lost[method] -= 1
            raise RankLost(f"the connection broke during {method}")
        return answer


def break_calls(cluster: Rig, num_grants: int, num_aborts: int) -> Broken:
    [handle] = cluster.gateway.fleet.of_kind("decode")
    broken = handle.control = Broken(handle.control, num_grants, num_aborts)
    return broken


async def test_a_pull_of_a_gateway_that_is_gone_ends_before_its_pages_come_free(
    small_model: Path,
) -> None:
    """The pull waits for a prompt whose prefill is held."""
    async with rig(small_model, *SETS) as cluster:
        [prefill], [decode] = cluster.prefills, cluster.decodes
        gate, session = Gate(prefill), cluster.gateway.fleet.session
        running = asyncio.create_task(cluster.complete(greedy("r", prompts(1, 9)[0], 8)))
        await until(lambda: decode.kv_receiver.counts()["pulls"])
        decode.sessions._renewed_at[session] -= 60
        await decode._sweep()
        assert not decode.kv_receiver.counts()["pulls"], "it writes to pages that are free"
        gate.open()
        ids, _, _ = await running
        assert len(ids) == 8
        await cluster.check_empty()


async def test_rows_whose_grant_and_abort_were_lost_come_free(small_model: Path) -> None:
    """All rows are lost this way. Retried requests wait for them, while heartbeats keep
    renewing."""
    async with rig(small_model, *SETS, "kv_transfer.lease_s=1", "decode.max_num_seqs=2") as cluster:
        broken = break_calls(cluster, num_grants=2, num_aborts=2)
        asked = [greedy(f"r{i}", ids, 8, ignore_eos=True) for i, ids in enumerate(prompts(2, 9))]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*map(cluster.complete, asked))
        assert not any(broken.num_lost.values())
        for request, (ids, _, _) in zip(asked, answers, strict=True):
            assert not near_ties(small_model, list(request.prompt_ids), ids)
        await cluster.check_empty()


async def test_an_orphan_that_decodes_is_ended(small_model: Path) -> None:
    """Its steps are held, so it cannot end by itself."""
    async with rig(small_model, *SETS, "kv_transfer.lease_s=1") as cluster:
        [decode] = cluster.decodes
        broken, gate = break_calls(cluster, num_grants=0, num_aborts=1), Gate(decode)
        running = asyncio.create_task(cluster.complete(greedy("r", prompts(1, 9)[0], 200)))
        await until(lambda: gate.is_held and are_active(decode, 1))
        running.cancel()
        await until(lambda: not broken.num_lost["abort"])
        await until(lambda: not decode.engine.scheduler.sequences, gate.answer)
        assert gate.num_given < 20
        gate.open()
        await cluster.check_empty()


class Doubled:
    """Sends each call to a rank twice. The first reply counts; the second may be a refusal."""

    def __init__(self, inner: Control) -> None:
        self._inner = inner
        self.refused: list[bytes] = []

    async def call(self, method: str, payload: bytes) -> bytes:
        first, second = (asyncio.create_task(self._inner.call(method, payload)) for _ in range(2))
        first_answer, second_answer = await asyncio.gather(first, second)
        if b"already" in second_answer:
            self.refused.append(second_answer)
        return first_answer


async def test_calls_that_come_twice_take_nothing_from_the_first(
    small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer may have to migrate."""
    asked = [greedy(f"r{i}", ids, 12, ignore_eos=True) for i, ids in enumerate(prompts(6, 9))]
    async with rig(small_model, *SETS) as cluster:
        right = [(await cluster.complete(request))[0] for request in asked]
        handles = [*cluster.gateway.fleet.ranks.values()]
        for handle in handles:
            handle.control = Doubled(handle.control)
        told = await asyncio.gather(*map(cluster.complete, asked))
        assert [ids for ids, _, _ in told] == right and "trying again" not in caplog.text
        assert sum(len(one.control.refused) for one in handles) >= 2 * len(asked)  # type: ignore[attr-defined]
        await cluster.check_empty()
