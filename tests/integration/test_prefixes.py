"""Equal prefixes are computed once, and answers do not depend on that."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from tests.rig import rig

SETS = ("kv.num_pages=400", "kv.page_size=16", "kv_transfer.checksums=true")


def prompts(num: int, min_len: int, max_len: int, seed: int = 5) -> list[list[int]]:
    return held_out(num, min_len, max_len, seed)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_a_shared_beginning_changes_no_token(small_model: Path, mode: str) -> None:
    [shared] = prompts(1, 300, 300)
    tails = prompts(4, 3, 40, seed=6)
    async with rig(
        small_model, *SETS, f"mode={mode}", "prefill.max_num_batched_tokens=64"
    ) as cluster:
        for i, tail in enumerate(tails):
            ids = shared + tail[1:]
            tokens, _, finished = await cluster.complete(greedy(f"r{i}", ids, 20, ignore_eos=True))
            assert not near_ties(small_model, ids, tokens)
            assert finished.usage.cached == (0 if i == 0 else 288)
            assert finished.kv_transfer.tokens == len(ids)
        await cluster.check_empty()


async def test_the_same_prompt_twice_keeps_its_acceptance(small_model: Path) -> None:
    """Cached pages must have correct draft entries too, or drafts would be worse the second
    time."""
    fixed = "speculation.draft_length=fixed"
    async with rig(small_model, *SETS, fixed) as cluster:
        for i, ids in enumerate(prompts(6, 64, 200)):
            first = await cluster.complete(greedy(f"a{i}", ids, 40, ignore_eos=True))
            again = await cluster.complete(greedy(f"b{i}", ids, 40, ignore_eos=True))
            assert again[0] == first[0]
            assert again[2].speculation == first[2].speculation
            assert again[2].usage.cached == (len(ids) - 1) // 16 * 16
        await cluster.check_empty()


async def test_many_shared_beginnings_in_a_pool_too_small_for_all(small_model: Path) -> None:
    shared = prompts(6, 100, 100)
    async with rig(small_model, "kv.num_pages=60", "kv.page_size=16") as cluster:
        asked = [greedy(f"r{i}", shared[i % 6] + [40 + i], 6, ignore_eos=True) for i in range(24)]
        for start in range(0, 24, 3):
            done = await asyncio.gather(*(cluster.complete(r) for r in asked[start : start + 3]))
            for request, (tokens, _, _) in zip(asked[start:], done, strict=False):
                assert not near_ties(small_model, list(request.prompt_ids), tokens)
        await cluster.check_empty()


async def test_two_prefill_nodes_hit_as_often_as_one(small_model: Path) -> None:
    """The router sends equal prefixes to the node that has them cached."""
    hits = []
    for replicas in (1, 2):
        async with rig(small_model, *SETS, f"prefill.replicas={replicas}") as cluster:
            cached = 0
            for i, ids in enumerate(prompts(6, 100, 100) * 4):
                request = greedy(f"r{i}", [*ids, 30 + i], 2, ignore_eos=True)
                _, _, finished = await cluster.complete(request)
                cached += finished.usage.cached
            hits.append(cached)
            await cluster.check_empty()
            if replicas == 2:
                steps = [p.engine.num_steps for p in cluster.prefills]
                assert min(steps) >= 6, f"one node does all the work: {steps}"
    assert hits[0] > 0 and hits[1] >= 0.9 * hits[0]
