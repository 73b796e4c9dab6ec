"""Result of every kind of acceptance for known drafts, and the start and end of thinking."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.cluster.entrypoints.request_mapping import acceptance_from_proto
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.config import TINY_MODEL
from tandem.core.request import RELAXED, RELAXED_LOG_PROBS, STRICT, SamplingParams
from tandem.model.sampling.acceptance import (
    ACCEPTANCE_RULES,
    RULE_NUMBERS,
    accept_drafts,
    sample_draft,
)
from tandem.model.sampling.acceptance.base import VerifyInput, VerifyResult
from tandem.model.sampling.thinking import phase_after, thinking_before
from tandem.text.think import is_thinking_at_start, read_think_ids
from tests.markov import judged_by, verify_input
from tests.unit.test_sampling import sampling_rows

BEGIN, END = THINK = (6, 7)
VOCAB = 8
GREEDY = SamplingParams()
SPREAD = [0.40, 0.30, 0.15, 0.10, 0.05, 0.0, 0.0, 0.0]
"""Probabilities: token i is the (i + 1)-th most likely; the last three are impossible."""
TIED = [0.1, 0.25, 0.25, 0.25, 0.15, 0.0, 0.0, 0.0]
ENDING = [0.40, 0.20, 0.0, 0.0, 0.0, 0.0, 0.10, 0.30]


def verdict_of(kind: str, known: VerifyInput) -> VerifyResult:
    rule_B = torch.full_like(known.acceptance.rule_B, RULE_NUMBERS[kind])
    return accept_drafts((kind,), judged_by(known, rule_B=rule_B))


def greedy_evidence(logits_BN1V: Tensor, drafts_BN: Tensor, limit_B: Tensor) -> VerifyInput:
    rows = sampling_rows(GREEDY, torch.zeros_like(limit_B))
    return verify_input(
        drafts_BN, logits_BN1V, rows, num_output_B=torch.ones_like(limit_B), limit_B=limit_B
    )


def relaxed(
    places: list[list[float]],
    drafts: list[int],
    *,
    top_n: int,
    delta: float,
    thinking: bool = True,
    kind: str = RELAXED,
    limit: int = 9,
) -> list[int]:
    """Return the tokens that one row emits."""
    known = greedy_evidence(
        torch.tensor([places]).log(), torch.tensor([drafts]), torch.tensor([limit])
    )
    known = judged_by(
        replace(known, thinking_B=torch.tensor([thinking]), think_ids=THINK),
        bounds_B2=torch.tensor([[top_n, delta]]),
    )
    result = verdict_of(kind, known)
    return result.tokens_BE[0, : int(result.num_accepted_B) + 1].tolist()


@pytest.mark.parametrize(
    ("drafts", "options", "expected"),
    [
        ([0], {"top_n": 1, "delta": 0.0}, [0, 0]),
        ([1], {"top_n": 1, "delta": 1.0}, [0]),
        ([1], {"top_n": 2, "delta": 0.2}, [1, 0]),
        ([1], {"top_n": 2, "delta": 0.05}, [0]),
        ([2], {"top_n": 2, "delta": 1.0}, [0]),
        ([2], {"top_n": 3, "delta": 0.26}, [2, 0]),
        ([2], {"top_n": 3, "delta": 0.24}, [0]),
        ([4], {"top_n": 5, "delta": 0.36}, [4, 0]),
        ([5], {"top_n": 8, "delta": 1.0}, [0]),
        ([1, 2, 1], {"top_n": 3, "delta": 0.3}, [1, 2, 1, 0]),
        ([1, 3, 1], {"top_n": 3, "delta": 0.3}, [1, 0]),
        ([1, 2, 1], {"top_n": 3, "delta": 0.3, "limit": 2}, [1, 2, 0]),
        ([1, 2, 1], {"top_n": 3, "delta": 0.3, "limit": 0}, [0]),
        ([1], {"top_n": 3, "delta": 0.3, "thinking": False}, [0]),
        ([0, 1], {"top_n": 3, "delta": 0.3, "thinking": False}, [0, 0]),
    ],
)
def test_top_n_and_delta(drafts: list[int], options: dict, expected: list[int]) -> None:
    assert relaxed([SPREAD] * (len(drafts) + 1), drafts, **options) == expected


@pytest.mark.parametrize(
    ("draft", "top_n", "expected"), [(1, 1, [1, 1]), (2, 1, [1]), (2, 2, [2, 1]), (3, 2, [1])]
)
def test_of_equally_likely_tokens_the_lower_id_ranks_first(
    draft: int, top_n: int, expected: list[int]
) -> None:
    assert relaxed([TIED] * 2, [draft], top_n=top_n, delta=0.0) == expected


def test_delta_on_log_probabilities_is_another_rule() -> None:
    """Check both rules around log 0.4 - log 0.05 = 2.08 and 0.4 - 0.05 = 0.35."""
    for kind, delta, passes in (
        (RELAXED, 0.36, True),
        (RELAXED_LOG_PROBS, 0.36, False),
        (RELAXED_LOG_PROBS, 2.07, False),
        (RELAXED_LOG_PROBS, 2.09, True),
        (RELAXED_LOG_PROBS, 100.0, True),
    ):
        told = relaxed([SPREAD] * 2, [4], top_n=8, delta=delta, kind=kind)
        assert told == ([4, 0] if passes else [0]), (kind, delta)
    assert relaxed([SPREAD] * 2, [5], top_n=8, delta=100.0, kind=RELAXED_LOG_PROBS) == [0]


@pytest.mark.parametrize(
    ("drafts", "thinking", "expected"),
    [
        ([1, 1], True, [1, 1, 0]),
        ([END, 1], True, [END, 0]),
        ([1, END, 0, 1], True, [1, END, 0, 0]),
        ([END, 0, 0], True, [END, 0, 0, 0]),
        ([END], False, [0]),
        ([END, BEGIN, 1], True, [END, 0]),
        ([BEGIN, 1, END, 1], True, [BEGIN, 1, END, 0]),
        ([1, END, 1], True, [1, END, 0]),
    ],
)
def test_the_phase_is_that_of_each_place(
    drafts: list[int], thinking: bool, expected: list[int]
) -> None:
    places = [ENDING] * (len(drafts) + 1)
    assert relaxed(places, drafts, top_n=4, delta=0.5, thinking=thinking) == expected


def test_thinking_may_begin_inside_a_chain() -> None:
    begins = [0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.8, 0.0]
    told = relaxed([begins, SPREAD, SPREAD], [BEGIN, 1], top_n=2, delta=0.2, thinking=False)
    assert told == [BEGIN, 1, 0]


@pytest.mark.parametrize("kind", [RELAXED, RELAXED_LOG_PROBS])
def test_top_1_and_delta_0_are_strict(kind: str) -> None:
    """Both kinds equal strict acceptance, also with ties, which argmax and rank must break
    identically."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (3000, 4, VOCAB), generator=g).float()
    drafts = logits[:, :3].argmax(2)
    drafts = torch.where(torch.rand(3000, 3, generator=g) < 0.3, drafts.flip(0), drafts)
    known = greedy_evidence(logits, drafts, torch.randint(0, 5, (3000,), generator=g))
    known = replace(known, thinking_B=torch.rand(3000, generator=g) < 0.7, think_ids=THINK)
    strict, other = verdict_of(STRICT, known), verdict_of(kind, known)
    assert torch.equal(strict.num_accepted_B, other.num_accepted_B)
    assert len(strict.num_accepted_B.unique()) == 4
    told = torch.arange(4) <= strict.num_accepted_B.unsqueeze(1)
    assert torch.equal(strict.tokens_BE[told], other.tokens_BE[told])


def test_phases_are_those_of_the_tokens_so_far() -> None:
    """Over random texts, the tensor form of a step equals reading the whole text."""
    rng = random.Random(1)
    texts = [[rng.choice((1, 2, BEGIN, END)) for _ in range(4)] for _ in range(300)]
    prompts = [[rng.choice((1, 2, BEGIN, END)) for _ in range(2)] for _ in texts]
    start_B = torch.tensor([is_thinking_at_start(prompt, [], THINK) for prompt in prompts])
    before = thinking_before(start_B, torch.tensor(texts), THINK).tolist()
    for num in range(5):
        after = phase_after(start_B, torch.tensor(texts), torch.full((300,), num), THINK).tolist()
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            expected = is_thinking_at_start(prompt, text[:num], THINK)
            assert after[i] == expected == is_thinking_at_start(prompt + text[:num], [], THINK)
            if num < 4:
                assert before[i][num] == expected
    assert not is_thinking_at_start([BEGIN], [], None)
    assert torch.equal(phase_after(start_B, torch.tensor(texts), start_B.long(), None), start_B)


def test_think_tokens_come_from_the_tokenizer(tmp_path: Path) -> None:
    names = ("<think>", "</think>")
    assert read_think_ids(TINY_MODEL, names) == (2, 3)
    assert read_think_ids(TINY_MODEL, ("<think>", "<reason>")) is None
    assert read_think_ids(tmp_path, names) is None
    shutil.copy(TINY_MODEL / "config.json", tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer.json: is not a tokenizer"):
        read_think_ids(tmp_path, names)


def test_kinds_are_those_of_the_proto() -> None:
    assert sorted(map(acceptance_from_proto, pb.Acceptance.values())) == sorted(ACCEPTANCE_RULES)
    assert RULE_NUMBERS[STRICT] == 0


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_step_neither_waits_for_the_host_nor_changes_shapes(num_drafts: int) -> None:
    """Run a step on meta tensors, where reading a value would fail."""
    with torch.device("meta"):
        ids_B = torch.zeros(4, dtype=torch.int64)
        rows = sampling_rows(SamplingParams(temperature=1.0), ids_B)
        drafts = torch.zeros(4, 0, dtype=torch.int64)
        for _ in range(num_drafts):
            draft, q = sample_draft(
                tuple(ACCEPTANCE_RULES), ids_B, torch.zeros(4, VOCAB), rows, ids_B, drafts
            )
            assert q is not None and q.shape == (4, VOCAB)
            drafts = torch.cat((drafts, draft.unsqueeze(1)), 1)
        known = verify_input(
            drafts,
            torch.zeros(4, num_drafts + 1, VOCAB),
            rows,
            num_output_B=ids_B,
            limit_B=ids_B,
            q_BNV=torch.zeros(4, num_drafts, VOCAB),
        )
        result = accept_drafts(tuple(ACCEPTANCE_RULES), replace(known, think_ids=THINK))
        assert result.tokens_BE.shape == (4, num_drafts + 1)
        assert result.num_accepted_B.shape == (4,)
        assert phase_after(ids_B > 0, result.tokens_BE, ids_B, THINK).shape == (4,)
