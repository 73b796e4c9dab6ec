"""A prefill node is lost: its answers continue through another one, and all requests go there."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from benchmarks.harness.procs import Serving, actors, serving
from tandem import AsyncClient, Completion
from tandem.core.config import TINY_MODEL
from tandem.core.control import Control
from tandem.core.errors import RankLost
from tandem.core.info import RankStatus
from tests.rig import rig
from tests.waiting import until

TWO_PREFILLS = ("prefill.replicas=2", "kv.num_pages=300", "kv.page_size=16")


def prompts(num: int, seed: int) -> list[list[int]]:
    return held_out(num, 20, 120, seed)


class Cut:
    """A control connection whose node cannot be reached while ``is_down``."""

    def __init__(self, control: Control) -> None:
        self.is_down = False
        self.calls: list[str] = []
        self._control = control

    async def call(self, method: str, payload: bytes) -> bytes:
        self.calls.append(method)
        if self.is_down:
            raise RankLost(f"{method}: no route")
        return await self._control.call(method, payload)


async def test_an_unreachable_node_is_left_out_until_it_answers(small_model: Path) -> None:
    async with rig(small_model, *TWO_PREFILLS) as cluster:
        handle = cluster.gateway.fleet.of_kind("prefill")[0]
        handle.control = cut = Cut(handle.control)

        async def ask(name: str) -> None:
            asked = [greedy(f"{name}{i}", ids, 8) for i, ids in enumerate(prompts(4, seed=5))]
            answers = await asyncio.gather(*(cluster.complete(request) for request in asked))
            for request, (ids, _, _) in zip(asked, answers, strict=True):
                assert not near_ties(small_model, list(request.prompt_ids), ids)

        cut.is_down = True
        await ask("found")
        assert "prefill" in cut.calls and cluster.gateway.is_healthy()
        cut.calls.clear()
        await ask("left out")
        assert set(cut.calls) <= {"ping", "heartbeat"}
        cut.is_down = False
        await until(lambda: handle.liveness.is_well)
        await ask("back")
        assert "prefill" in cut.calls
        await cluster.check_empty()


async def test_a_prefill_node_whose_engine_stopped_is_left_out(small_model: Path) -> None:
    async with rig(small_model, *TWO_PREFILLS) as cluster:
        broken = cluster.prefills[0]

        def step() -> None:
            raise RuntimeError("cosmic ray")

        broken.engine.step = step  # type: ignore[method-assign]
        asked = [greedy(f"r{i}", ids, 8) for i, ids in enumerate(prompts(6, seed=6))]
        answers = await asyncio.gather(*(cluster.complete(request) for request in asked))
        for request, (ids, _, _) in zip(asked, answers, strict=True):
            assert not near_ties(small_model, list(request.prompt_ids), ids)
        assert isinstance(broken.loop.failure, RuntimeError)
        await cluster.complete(greedy("one more", prompts(1, seed=7)[0], 8))
        await cluster.complete(greedy("and one", prompts(1, seed=8)[0], 8))
        ranks = cluster.gateway.fleet.ranks.values()
        out = [rank.info.spec.gang for rank in ranks if rank.liveness.is_out]
        assert out == ["prefill-0"]
        for decode in cluster.decodes:
            assert (
                not decode.engine.scheduler.sequences and not decode.kv_receiver.counts()["pulls"]
            )


def num_retries(server: Serving) -> int:
    return sum("trying again" in line for line in server.log)


async def all_idle(client: AsyncClient) -> tuple[RankStatus, ...]:
    """Return the status of the three nodes once all are alive and idle."""
    nodes: tuple[RankStatus, ...] = ()

    async def are_idle() -> bool:
        nonlocal nodes
        nodes = (await client.status()).ranks
        return len(nodes) == 3 and all(map(is_idle, nodes))

    await until(are_idle)
    return nodes


def is_idle(node: RankStatus) -> bool:
    held = node.num_active_rows, node.num_open_leases, node.max_tokens - node.num_free_tokens
    return node.alive and not any(held)


@pytest.mark.slow
async def test_a_killed_prefill_process_costs_no_answer() -> None:
    """Real processes: one of two prefill nodes is killed while both work."""
    with serving(*TWO_PREFILLS) as server:
        async with AsyncClient(server.address, retry_s=0) as client:
            gate, asked = asyncio.Semaphore(8), prompts(40, seed=9)
            victim = actors(server.process.pid, "PrefillActor")[0]
            epochs = {node.epoch for node in await all_idle(client)}
            answered: list[tuple[list[int], Completion]] = []

            async def ask(ids: list[int]) -> None:
                async with gate:
                    answer = await client.complete(ids, max_tokens=24, ignore_eos=True)
                answered.append((ids, answer))
                if len(answered) == 8:
                    os.kill(victim, signal.SIGKILL)

            await asyncio.gather(*(ask(ids) for ids in asked))
            told = sum("is lost and gets no requests" in line for line in server.log)
            assert told <= 1, "once, unless the membership has told of it before"
            num_before = num_retries(server)
            assert 1 <= num_before <= 16, "each of those in flight, and nobody thrice"
            await asyncio.gather(*(ask(ids) for ids in asked[:10]))
            assert num_retries(server) == num_before, "the lost node was still routed to"
            checked = {tuple(a.token_ids): ids for ids, a in answered}
            for tokens, ids in checked.items():
                assert not near_ties(TINY_MODEL, ids, list(tokens))
            nodes = await all_idle(client)
            assert len({node.epoch for node in nodes} - epochs) == 1, "one has a new life"
        assert server.stop() == 0
