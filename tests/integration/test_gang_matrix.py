"""Gangs of every size hand over to gangs of every size, and no token depends on the sizes.

The whole matrix: ``pytest -m "slow or not slow" tests/integration/test_gang_matrix.py``.
"""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from benchmarks.harness.procs import serving, tandem
from benchmarks.soak.check import score_ties
from tandem import Client
from tandem.core.config import TINY_MODEL
from tandem.core.request import Request
from tests.often import often
from tests.rig import Rig, rig
from tests.waiting import until

SETS = (
    "kv.page_size=8",
    "kv.num_pages=80",
    "decode.max_num_seqs=3",
    "prefill.max_num_batched_tokens=48",
)
SIZES = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4)]
IN_MAKE_TEST = {(2, 2), (1, 4)}
NUM_REQUESTS = 18


def requests(num: int, seed: int) -> list[Request]:
    """Return greedy requests with 0 to 3 drafts; every third request is sampled."""
    choose = random.Random(seed)
    made = []
    for i in range(num):
        prompt = [choose.randrange(2, 2000) for _ in range(choose.randrange(3, 60))]
        asked = greedy(f"r{seed}-{i}", prompt, choose.randrange(4, 30), max_drafts=i % 4)
        if i % 3 == 2:
            sampling = replace(asked.sampling, temperature=0.8, top_p=0.9, seed=seed + i)
            asked = replace(asked, sampling=sampling)
        made.append(asked)
    return made


def check(small_model: Path, request: Request, token_ids: list[int]) -> list[str]:
    """Return near ties; assert that all other tokens equal the reference."""
    if request.sampling.temperature > 0:
        return score_ties(request, token_ids, frozenset(), small_model)
    return near_ties(small_model, list(request.prompt_ids), token_ids)


async def serve_and_check(cluster: Rig, small_model: Path) -> None:
    """Serve requests and check their answers.

    One request runs alone first, so that one rank is busy and the others are idle. Then requests
    join one after another, so that ranks change between busy and idle.
    """
    engine = cluster.decodes[0].engine
    [first, *others] = requests(NUM_REQUESTS, seed=len(cluster.decodes))
    answers = [(first, await cluster.complete(first))]

    async def later(i: int, request: Request) -> None:
        begin = 3 * i
        await until(lambda: engine.num_steps - before >= begin or not any(cluster.begun.values()))
        answers.append((request, await cluster.complete(request)))

    before = engine.num_steps
    await asyncio.gather(*(later(i, request) for i, request in enumerate(others)))
    ties = [tie for request, (ids, _, _) in answers for tie in check(small_model, request, ids)]
    assert len(ties) <= 1, ties
    for gang in (cluster.prefills, cluster.decodes):
        assert len({rank.loop.stall_detector.position().step for rank in gang}) == 1, (
            "all are in step"
        )
        assert all(rank.loop.failure is None for rank in gang)
    served = [rank.spec.rank for rank in cluster.decodes if rank.engine.step_s > 0]
    assert len(served) == len(cluster.decodes)
    await cluster.check_empty()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    often(SIZES, IN_MAKE_TEST),
)
async def test_all_sizes_with_three_drafts(prefill: int, decode: int, small_model: Path) -> None:
    sizes = f"prefill.dp_size={prefill}", f"decode.dp_size={decode}"
    async with rig(small_model, *SETS, *sizes) as cluster:
        await serve_and_check(cluster, small_model)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
async def test_fewer_drafts(num_drafts: int, small_model: Path) -> None:
    sizes = "prefill.dp_size=2", "decode.dp_size=4", f"speculation.max_depth={num_drafts}"
    async with rig(small_model, *SETS, *sizes) as cluster:
        await serve_and_check(cluster, small_model)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("speculation.handover_hidden=false",), id="zero_hidden"),
        pytest.param(("prefill.dispatch=all_gather", "decode.dispatch=all_to_all"), id="dispatch"),
        pytest.param(
            ("prefill.num_redundant_experts=4", "decode.num_redundant_experts=2"),
            id="replicas",
            marks=pytest.mark.slow,
        ),
        pytest.param(("decode.overlap=true",), id="overlapped", marks=pytest.mark.slow),
    ],
)
async def test_other_ways(more: tuple[str, ...], small_model: Path) -> None:
    sizes = "prefill.dp_size=2", "decode.dp_size=2"
    async with rig(small_model, *SETS, *sizes, *more) as cluster:
        await serve_and_check(cluster, small_model)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_all_sizes_through_real_processes(prefill: int, decode: int) -> None:
    """Start one process per rank with the shipped checkpoint. Send one request alone, then ten at
    once."""
    sizes = f"prefill.dp_size={prefill}", f"decode.dp_size={decode}"
    first, *others = held_out(11, 20, 120, seed=10 * prefill + decode)
    more = "kv.num_pages=300", "kv.page_size=16", "speculation.profile_at_startup=true"
    with serving(*sizes, *more) as server:
        with Client(server.address) as client, ThreadPoolExecutor(len(others)) as pool:

            def ask(i: int, ids: list[int]) -> list[int]:
                done = client.complete(
                    ids, max_tokens=10 + 5 * i, max_drafts=i % 4, ignore_eos=True
                )
                return list(done.token_ids)

            answers = [ask(3, first), *pool.map(ask, range(len(others)), others)]
        ties = [near_ties(TINY_MODEL, *one) for one in zip((first, *others), answers, strict=True)]
        assert [len(answer) for answer in answers] == [25, *range(10, 60, 5)]
        assert sum(map(len, ties)) <= 1, ties
        shown = tandem("status", "--address", server.address, "--json")
        assert len(json.loads(shown.stdout)["ranks"]) == prefill + decode
