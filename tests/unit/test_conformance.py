"""The rules of tests/conformance.py for every drafter.

Strict answers equal those without drafts, bit for bit in tokens and log probabilities. This holds
at every level, in every loop and wherever a row migrates.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch

from benchmarks.harness.engines import POISON, Bench
from tandem.core.execution import RECORDED
from tandem.core.pages import DUMMY_PAGE
from tandem.core.request import REJECTION, REJECTION_GREEDY, STRICT, Request, Speculation
from tandem.decode_node.planning.step_plan import PROFILE, SERVE, StepKey, StepPlan
from tandem.model.loaded import LoadedModel
from tests.conformance import (
    DRAFTERS,
    HIDDEN,
    WITHOUT_TREES,
    Answer,
    bench_of,
    depth_of,
    loaded_with,
    mixed,
    texts,
    tokens_of,
    told,
)

NUM_TOKENS = 14
MODEL_LEN = 70


class Models:
    """Loads models on first use, and computes the answers without drafts."""

    def __init__(self) -> None:
        self.asked = mixed(texts(6), NUM_TOKENS)
        self._loaded: dict[tuple[str, str], LoadedModel] = {}
        self._plain: dict[str, list[Answer]] = {}

    def of(self, name: str, dtype: str = "float32") -> LoadedModel:
        if (name, dtype) not in self._loaded:
            self._loaded[name, dtype] = loaded_with(name, dtype)
        return self._loaded[name, dtype]

    def plain(self, dtype: str = "float32") -> list[Answer]:
        if dtype not in self._plain:
            bench = Bench(self.of("mtp", dtype), num_drafts=0, max_rows=8)
            self._plain[dtype] = told(bench, self.asked)
        return self._plain[dtype]

    @cached_property
    def to_the_end(self) -> tuple[list[Request], list[Answer]]:
        """Requests for more tokens than the model's context holds, and their answers without
        drafts."""
        long = [replace(one, sampling=replace(one.sampling, max_tokens=500)) for one in self.asked]
        loaded = replace(self.of("mtp"), max_model_len=MODEL_LEN)
        return long, told(Bench(loaded, num_drafts=0, max_rows=8), long)


def often(names: Collection[str]) -> list[Any]:
    """Return all drafters as parameters, marking those that are not in ``names`` as slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in names else slow) for name in DRAFTERS]


MOST = [name for name in DRAFTERS if name not in WITHOUT_TREES]
most_drafters = pytest.mark.parametrize("name", often(MOST))


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(params=DRAFTERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_levels_give_the_answers_of_none(models: Models, name: str, dtype: str) -> None:
    """Test the first and the highest level in fp32 and the highest in bf16. Some drafts are
    accepted."""
    if dtype == "bfloat16" and name not in MOST:
        pytest.skip("its tree is tested, and make soak tests all levels")
    levels = models.of(name).drafter.draft_shapes(depth_of(name))
    lowest = 1 if dtype == "float32" and name in MOST else len(levels) - 1
    for level in {lowest, len(levels) - 1}:
        check_level(models, name, dtype, level)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_levels_between_the_first_and_the_highest(models: Models, name: str, dtype: str) -> None:
    levels = models.of(name).drafter.draft_shapes(depth_of(name))
    for level in range(1, len(levels) - 1):
        check_level(models, name, dtype, level)


def check_level(models: Models, name: str, dtype: str, level: int) -> None:
    """Check the answers at one level and, at the highest, that drafts of that size are accepted."""
    loaded = models.of(name, dtype)
    levels, bench = loaded.drafter.draft_shapes(depth_of(name)), bench_of(loaded, name, level)
    assert told(bench, models.asked) == models.plain(dtype), levels[level]
    counts = [one.counts for one in bench.updates() if one.counts is not None]
    if level == len(levels) - 1:
        assert sum(one.num_accepted for one in counts) > 0
        assert max(one.num_nodes / one.num_steps for one in counts) == levels[-1].num_nodes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_held_out_prompts(models: Models, name: str, dtype: str) -> None:
    """Check the answers to a hundred held-out prompts at every level."""
    loaded = models.of(name, dtype)
    asked = mixed(texts(100, most=256, seed=11), 48)
    batches = [asked[at : at + 8] for at in range(0, len(asked), 8)]
    expected = [
        told(Bench(loaded, num_drafts=0, max_rows=8, num_pages=900), batch) for batch in batches
    ]
    for level in range(1, len(loaded.drafter.draft_shapes(depth_of(name)))):
        for batch, answers in zip(batches, expected, strict=True):
            assert told(bench_of(loaded, name, level, num_pages=900), batch) == answers


def test_steps_are_recorded_once_and_played(models: Models, name: str) -> None:
    """A program could not be replayed if a shape changed or a value went through the host. Uses the
    overlapped loop, which launches a step before the result of the last one is read."""
    loaded = models.of(name)
    bench = bench_of(loaded, name, overlap=True)
    assert told(bench, models.asked) == models.plain()
    assert (
        loaded.exec_mode == RECORDED and not loaded.uncapturable and bench.decode.programs.functions
    )


@most_drafters
def test_rows_that_are_judged_by_p_and_q_beside_strict_ones(models: Models, name: str) -> None:
    """In a mixed batch of recorded programs, strict rows keep their answers. So do greedy rows,
    because both kinds of acceptance treat them identically."""
    loaded = models.of(name)
    asked = of_all_kinds(models.asked)
    answers = told(bench_of(loaded, name), asked)
    for one, answer, expected in zip(asked, answers, models.plain(), strict=True):
        is_same = one.speculation.acceptance == STRICT or one.sampling.temperature == 0
        assert not is_same or answer == expected
    assert not loaded.uncapturable


@pytest.mark.parametrize("name", often(["ngram", "eagle3 tree"]))
def test_rows_that_are_judged_by_p_and_q_are_judged_alike_again(models: Models, name: str) -> None:
    asked = of_all_kinds(models.asked)
    first, again = (tokens_of(told(bench_of(models.of(name), name), asked)) for _ in range(2))
    assert first == again


def of_all_kinds(asked: list[Request]) -> list[Request]:
    """Return the requests with strict acceptance, rejection and greedy rejection in turns."""
    kinds = [STRICT, REJECTION, REJECTION_GREEDY] * 2
    return [
        replace(one, speculation=Speculation(acceptance=kind))
        for one, kind in zip(asked, kinds, strict=True)
    ]


@most_drafters
def test_few_pages_and_old_entries(models: Models, name: str) -> None:
    """Rows are preempted and restarted. Unwritten cache entries hold garbage, which must not be
    read."""
    bench = bench_of(models.of(name), name, page_size=2, num_pages=400)
    for cache in bench.all_caches():
        cache.fill_(POISON)
    assert tokens_of(told(bench, models.asked, spare=10)) == tokens_of(models.plain())
    assert len(bench.updates()) < NUM_TOKENS, "the last one ran alone: it had been preempted"


@most_drafters
def test_the_end_of_the_model(models: Models, name: str) -> None:
    """Answers are right at the end of the context, where drafts would reach beyond the last
    position."""
    loaded = replace(models.of(name), max_model_len=MODEL_LEN)
    long, expected = models.to_the_end
    assert told(bench_of(loaded, name, page_size=4), long) == expected
    ends = [len(one.prompt_ids) + len(e) for one, e in zip(long, expected, strict=True)]
    assert max(ends) == MODEL_LEN


@most_drafters
def test_an_answer_goes_on_elsewhere(models: Models, name: str) -> None:
    """Answers that resume after the ninth token, in another page pool and other batches, are the
    same."""
    loaded, whole = models.of(name), models.plain()
    resumed = [
        replace(one, output_ids=(*tokens[:9],))
        for one, tokens in zip(models.asked, tokens_of(whole), strict=True)
    ]
    rests = tokens_of(told(bench_of(loaded, name, page_size=16), resumed[::-1]))[::-1]
    assert rests == [tokens[9:] for tokens in tokens_of(whole)]


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_states_that_were_not_shipped(models: Models, name: str) -> None:
    bench = bench_of(models.of(name), name, handover_hidden=False)
    assert told(bench, models.asked) == models.plain()


def test_steps_of_nobody_leave_no_trace(models: Models, name: str) -> None:
    """Run dummy steps and trial steps, which read other rows' pages, between steps with rows."""
    loaded = models.of(name)
    bench = bench_of(loaded, name)
    bench.start_all(*models.asked)
    launcher, num = bench.decode._launcher, len(models.asked)
    table = launcher.rows._drafter_table
    table = table[0] if isinstance(table, tuple) else table
    before = [cache[1:].clone() for cache in bench.all_caches()]
    known = None if table is None else table[:num].clone()
    levels, catch_up = loaded.drafter.draft_shapes(depth_of(name)), loaded.drafter.catch_up(4)
    key = StepKey(
        4, len(levels) - 1, catch_up.catch_up_width(levels[-1].depth, catch_up.initial_backlog)
    )
    rows = launcher.rows
    is_first_unknown_B = rows._table.page_table_BP[rows.row_indices([], 4, is_profile=True)[0]][
        :, 0
    ]
    assert len({*is_first_unknown_B.tolist()} - {DUMMY_PAGE}) == 4
    for use in (SERVE, PROFILE):
        with torch.inference_mode():
            launcher.launch(launcher.prepare([], StepPlan(key, use))).collect()
    assert all(map(torch.equal, before, [cache[1:] for cache in bench.all_caches()]))
    assert known is None or torch.equal(known, table[:num])
    for one in models.asked:
        bench.drop(one.request_id)
    bench.check_empty()
