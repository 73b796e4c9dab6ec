"""The soak test detects errors: a wrong token, a text that is not cut, a stream that hangs."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.engines import Bench, load
from benchmarks.harness.tiny import reference_greedy
from benchmarks.soak.check import Checker, first_stop, score_ties, to_request
from benchmarks.soak.freed import Freed
from benchmarks.soak.load import Answer, Load
from benchmarks.soak.plans import Plan, Shares, plans
from tandem.core.config import TINY_MODEL
from tandem.core.stopping import stop_ids
from tests.waiting import PATIENCE_S

RULES = {
    "temperature": 0.9, "seed": 2**62 + 5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    "logit_bias": {300: 3.0}, "min_tokens": 4,
}  # fmt: skip
IDS = [0, 100, 200, 300, 400]


def answer_of(options: dict[str, Any], index: int = 0) -> Answer:
    options = {"max_tokens": 12, "max_drafts": 3, "ignore_eos": True} | options
    return Answer(Plan("r", IDS, options, "", 0.0), index)


def written(answer: Answer) -> Answer:
    """Fill in the answer that our engines give."""
    bench = Bench(load(TINY_MODEL))
    [(answer.token_ids, answer.reason)] = bench.generate(to_request(answer))
    return answer


async def checked(answer: Answer, whole: Answer | None = None) -> list[str]:
    """Return the errors that the checker reports. ``whole`` is the answer of the same request run
    alone."""

    async def run_alone(plan: Plan, changes: dict[str, Any]) -> Answer:
        assert whole is not None and changes["max_drafts"] == 0
        return whole

    checker = Checker(run_alone, (1,))
    await checker.check(answer)
    assert checker.found.num == 1 and not checker.found.ties
    return checker.found.wrong


@pytest.mark.parametrize("options", [RULES, {"repetition_penalty": 1.3}, RULES | {"n": 3}])
def test_the_float64_reference_chooses_as_our_engines_do(options: dict[str, Any]) -> None:
    answer = written(answer_of(options, index=options.get("n", 1) - 1))
    request = to_request(answer)
    stops = stop_ids(request.sampling, (1,))
    assert score_ties(request, answer.token_ids, stops) == []
    wrong = [*answer.token_ids[:-1], answer.token_ids[-1] + 1]
    with pytest.raises(AssertionError, match="token 11"):
        score_ties(request, wrong, stops)
    other_seed = replace(request, sampling=replace(request.sampling, seed=1))
    if request.sampling.temperature:
        with pytest.raises(AssertionError):
            score_ties(other_seed, answer.token_ids, stops)


async def test_a_plain_answer_is_held_against_transformers() -> None:
    checker = Checker(None, ())  # type: ignore[arg-type]
    right = answer_of({})
    right.token_ids, right.reason = reference_greedy(TINY_MODEL, IDS, 12), "length"
    right.text = checker._tokenizer.decode(right.token_ids)
    assert await checked(right) == []
    assert await checked(replace(right, token_ids=right.token_ids[:5], reason="")) == []
    assert await checked(replace(right, text=right.text + "x"))
    assert await checked(replace(right, token_ids=right.token_ids[:5]))
    assert await checked(replace(right, token_ids=[*right.token_ids[:4], 9, *right.token_ids[5:]]))


async def test_an_answer_is_the_one_alone_cut_at_its_stop_string() -> None:
    checker = Checker(None, ())  # type: ignore[arg-type]
    whole = written(answer_of(RULES))
    pieces = [checker._tokenizer.decode([token]) for token in whole.token_ids]
    whole.text = "".join(pieces)
    stop = pieces[6]
    num = next(i for i in range(12) if stop in "".join(pieces[: i + 1])) + 1
    cut = answer_of(RULES | {"stop": [stop]})
    cut.token_ids, cut.reason = whole.token_ids[:num], "stop"
    cut.text = whole.text[: whole.text.index(stop)]
    assert await checked(cut, whole) == []
    assert await checked(replace(cut, text=cut.text + stop), whole)
    assert await checked(replace(cut, reason="length"), whole)
    assert await checked(replace(cut, token_ids=whole.token_ids[: num + 1]), whole)
    assert await checked(replace(cut, token_ids=[5, *cut.token_ids[1:]]), whole)
    unstopped = replace(cut, plan=replace(cut.plan, options=RULES), text=whole.text)
    assert await checked(unstopped, whole), "it ended too early"


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    assert first_stop("abcabc", ("c", "bc", "x")) == 1
    assert first_stop("abc", ("d",)) is None


def test_plans_are_the_same_again_and_have_their_shares() -> None:
    asked = list(plans(7, 400, 60, 20, Shares(cancel=0.5, deadline=0.25)))
    assert asked == list(plans(7, 400, 60, 20, Shares(cancel=0.5, deadline=0.25)))
    assert len({plan.name for plan in asked}) == 400
    ends = Counter(plan.ending for plan in asked)
    assert all(60 < ends[kind] < 150 for kind in ("drop", "abort", "deadline", ""))
    assert {len(plan.ids) for plan in asked} <= set(range(1, 61))
    assert not any({"stop", "min_tokens"} <= plan.options.keys() for plan in asked)


class Stuck:
    """A client whose streams never send anything."""

    num_open = 0

    async def generate(self, ids: list[int], **options: Any) -> AsyncIterator[Any]:
        self.num_open += 1
        try:
            await asyncio.Event().wait()
            yield None
        finally:
            self.num_open -= 1


async def test_a_stream_that_hangs_ends_the_load() -> None:
    client = Stuck()
    run = Load(client, Freed([]), lambda tally: None, hang_s=0.2)  # type: ignore[arg-type]
    asked = iter([Plan(f"r{i}", [0], {}, "", 0.0) for i in range(3)])
    async with asyncio.timeout(PATIENCE_S):
        tally = await run.run(asked, 2, math.inf)
    assert len(tally.errors) == 1 and "r0" in tally.errors[0] and client.num_open == 0
