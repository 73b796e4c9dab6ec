"""Pools that are too small: sequences are preempted and resume; no token is lost or repeated."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from benchmarks.harness.exact import near_ties
from benchmarks.harness.held_out import held_out
from tandem.core.draft_shapes import chain_shapes
from tandem.core.identity import Identity
from tandem.core.request import PREEMPTED
from tandem.decode_node.planning.scheduler import Scheduler
from tandem.decode_node.planning.states import RequestSize, RunningSequence
from tandem.kv_transfer.pages import PagePool
from tests.rig import Rig, rig


def prompts(num: int, min_len: int = 20, max_len: int = 60) -> list[list[int]]:
    return held_out(num, min_len, max_len, seed=31)


def watch(cluster: Rig) -> list[str]:
    """Return a list that collects the request ids of sequences preempted from now on."""
    preempted: list[str] = []
    for decode in cluster.decodes:
        publish = decode.engine._on_updates

        def noting(updates, publish=publish):
            gone = [u.identity for u in updates if u.finish_reason == PREEMPTED]
            preempted.extend(identity.request_id for identity in gone)
            publish(updates)

        decode.engine._on_updates = noting
    return preempted


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_preempted_sequences_go_on_exactly(small_model: Path, mode: str) -> None:
    sets = ("kv.num_pages=26", "kv.page_size=8", f"mode={mode}", "decode.max_num_seqs=6")
    async with rig(small_model, *sets) as cluster:
        preempted = watch(cluster)
        asked = [greedy(f"r{i}", ids, 70, ignore_eos=True) for i, ids in enumerate(prompts(8))]
        answers = await asyncio.gather(*(cluster.complete(request) for request in asked))
        for request, (tokens, text, finished) in zip(asked, answers, strict=True):
            assert len(tokens) == 70 and finished.finish_reason == "length"
            assert not near_ties(small_model, list(request.prompt_ids), tokens)
            assert text == cluster.gateway.tokenizer.decode(tokens)
        assert preempted, "the pool was meant to be too small"
        await cluster.check_empty()


async def test_two_near_half_sequences_share_one_pool(small_model: Path) -> None:
    """Colocated, each sequence takes over 40 % of the pool. Both are preempted and resumed, and
    neither waits for pages that the other's prompt would have to free."""
    sets = ("mode=colocated", "kv.num_pages=60", "kv.page_size=8", "decode.max_num_seqs=4")
    async with rig(small_model, *sets) as cluster:
        preempted = watch(cluster)
        asked = [
            greedy(f"r{i}", ids, 200, ignore_eos=True) for i, ids in enumerate(prompts(3, 190, 200))
        ]
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(cluster.complete(request) for request in asked))
        for request, (tokens, _, _) in zip(asked, answers, strict=True):
            assert len(tokens) == 200
            assert not near_ties(small_model, list(request.prompt_ids), tokens)
        assert len(preempted) > 1
        await cluster.check_empty()


async def test_a_preempted_sample_is_the_sample_it_would_have_been(small_model: Path) -> None:
    asked = []
    for i, ids in enumerate(prompts(6)):
        request = greedy(f"r{i}", ids, 60, ignore_eos=True)
        hot = replace(request.sampling, temperature=0.8, seed=100 + i)
        asked.append(replace(request, sampling=hot))
    async with rig(small_model, "kv.num_pages=400", "kv.page_size=8") as cluster:
        alone = [(await cluster.complete(request))[0] for request in asked]
    async with rig(small_model, "kv.num_pages=22", "kv.page_size=8") as cluster:
        preempted = watch(cluster)
        crowded = await asyncio.gather(*(cluster.complete(request) for request in asked))
        await cluster.check_empty()
    assert preempted
    assert [tokens for tokens, _, _ in crowded] == alone


def enter(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int) -> Identity:
    identity = Identity(name)
    scheduler.enqueue(identity, RequestSize(num_prompt, 0, max_tokens))
    assert scheduler.grant() == [identity]
    return identity


def run(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int) -> RunningSequence:
    identity = enter(scheduler, name, num_prompt, max_tokens)
    sequence = scheduler.build_running(identity, greedy(name, range(num_prompt), max_tokens))
    scheduler.start_steps(sequence)
    return sequence


def test_the_youngest_makes_way_and_the_oldest_never() -> None:
    pool = PagePool(11, 4)
    scheduler = Scheduler(pool, 4, chain_shapes(1), 1000, ())
    old, young = (run(scheduler, name, 4, 24) for name in ("old", "young"))
    gone = []
    for num_output in range(1, 24):
        for sequence in (old, young):
            sequence.num_output = num_output
        gone += scheduler.grow_or_preempt()
        scheduler.check_integrity()
        assert old.identity in scheduler.sequences
        assert len(old.pages) * 4 >= min(4 + num_output + 4, 4 + 24)
    assert gone == [young] and young.identity not in scheduler.sequences


def test_arriving_sequences_are_not_preempted() -> None:
    pool = PagePool(9, 4)
    scheduler = Scheduler(pool, 4, chain_shapes(1), 1000, ())
    runs = run(scheduler, "runs", 4, 16)
    arrives = enter(scheduler, "arrives", 6, 4)
    runs.num_output = 16
    assert scheduler.grow_or_preempt() == [] or runs.identity not in scheduler.sequences
    assert arrives in scheduler.sequences
    scheduler.check_integrity()
