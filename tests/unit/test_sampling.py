"""Drawn tokens have the exact distribution, with and without filters and penalties."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from benchmarks.harness import tiny
from tandem.core.request import Request, SamplingParams, TokenBias
from tandem.model.checkpoint.tensors import select_rows
from tandem.model.sampling.adjust import adjust, count_emitted, no_rules, set_rules
from tandem.model.sampling.sampler import SamplingRows, apply_rules, draw, gumbel
from tests.numerics import assert_near, rounding

EOS = tiny.BASE["eos_token_id"]
VOCAB = 12
NUM_DRAWS = 20_000
RULES = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=(TokenBias(3, 1.0), TokenBias(8, -2.0)),
)


def obvious(logits: Tensor, prompt: list[int], output: list[int], s: SamplingParams) -> Tensor:
    """Return the adjusted logits [V] of one place, computed token by token. Only EOS ends these
    answers."""
    logits = logits.clone()
    for item in s.logit_bias:
        logits[item.token_id] += item.bias
    seen = torch.tensor([prompt + output])
    logits = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(seen, logits[None])[0]
    for token in set(output):
        logits[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    if len(output) < s.min_tokens:
        logits[EOS] = -math.inf
    return logits


def filtered(logits: Tensor, s: SamplingParams) -> list[float]:
    """Return the exact distribution after temperature, top-k, top-p and min-p, token by token."""
    p = (logits.double() / s.temperature).softmax(0).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    order = order[: s.top_k or len(p)]
    mass, kept, total = 0.0, [], sum(p[token] for token in order)
    for token in order:
        if mass < s.top_p * total and p[token] >= s.min_p * p[order[0]]:
            kept.append(token)
        mass += p[token]
    norm = sum(p[token] for token in kept)
    return [p[token] / norm if token in kept else 0.0 for token in range(len(p))]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("rules", [SamplingParams(), RULES], ids=["plain", "penalties"])
@pytest.mark.parametrize("varied", ["seed", "index"])
def test_draws_follow_the_exact_distribution(
    settings: dict[str, float], rules: SamplingParams, varied: str
) -> None:
    """Chi-square tests over seeds and over output indices; both must look independent."""
    s = replace(rules, **settings)  # type: ignore[arg-type]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    prompt, output, drafts = [1, 3, 5], [3, 7, 7], [2, 7]
    count = torch.arange(NUM_DRAWS)
    num_output = count if varied == "index" else torch.full_like(count, len(output))
    rows = sampling_rows(s, count if varied == "seed" else torch.full_like(count, 99))
    if rules.adjusts_logits:
        table = no_rules(1, VOCAB, torch.device("cpu"))
        set_rules(table, 0, Request("r", tuple(prompt), sampling=s), tuple(output), frozenset())
        rows = replace(rows, rules=select_rows(table, torch.zeros_like(count)))
    drafts_BN = torch.tensor([drafts]).expand(NUM_DRAWS, -1)
    adjusted_BV = apply_rules(logits.expand(NUM_DRAWS, -1), rows, num_output, drafts_BN)
    drawn = draw(adjusted_BV, rows, num_output + len(drafts))
    expected = filtered(obvious(logits, prompt, output + drafts, s), s)
    check_chi_square(drawn.bincount(minlength=VOCAB).tolist(), expected)


def test_a_seed_means_the_same_noise_for_ever() -> None:
    """Users keep seeds, so the values stay those of the first release."""
    for seed, index, expected in (
        (99, 7, [2.1365495, 0.5470362, -0.2315207, 0.2935826]),
        (2**63 - 1, 200_000, [-0.1325294, 0.4580280]),
    ):
        [noise] = gumbel(torch.tensor([seed]), torch.tensor([index]), len(expected))
        wanted = torch.tensor(expected, dtype=torch.float64)
        # Half of the last written digit, plus the rounding to float32.
        assert_near(noise, wanted, 5e-8 + rounding(1, float(wanted.abs().max())))


def sampling_rows(s: SamplingParams, seed_B: Tensor) -> SamplingRows:
    def floats(value: float) -> Tensor:
        return torch.full(seed_B.shape, value)

    return SamplingRows(
        temperature_B=floats(s.temperature),
        top_k_B=torch.full_like(seed_B, s.top_k),
        top_p_B=floats(s.top_p),
        min_p_B=floats(s.min_p),
        seed_B=seed_B,
        all_greedy=s.temperature == 0,
    )


def check_chi_square(counts: list[int], expected: list[float]) -> None:
    """Check that the statistic is below the 99.9 % quantile (Wilson-Hilferty), and that no count is
    outside the support."""
    assert not any(n for n, p in zip(counts, expected, strict=True) if p == 0)
    total, freedom = sum(counts), sum(p > 0 for p in expected) - 1
    assert freedom > 0
    statistic = sum(
        (n - total * p) ** 2 / (total * p) for n, p in zip(counts, expected, strict=True) if p
    )
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.09 * spread**0.5) ** 3, (counts, expected)


def test_counts_are_those_of_the_tokens_kept() -> None:
    table = no_rules(3, VOCAB, torch.device("cpu"))
    tokens = torch.tensor([[4, 4, 5], [4, 6, 7]])
    count_emitted(table, torch.tensor([2, 0]), tokens, torch.tensor([3, 1]))
    assert table.count_BV[2].nonzero().flatten().tolist() == [4, 5]
    assert table.count_BV.sum(1).tolist() == [1, 0, 3] and table.count_BV[2, 4] == 2


def test_a_row_without_rules_keeps_its_logits_to_the_bit() -> None:
    table = no_rules(1, VOCAB, torch.device("cpu"))
    set_rules(table, 0, Request("r", (1, 2), sampling=SamplingParams()), (3, 3), frozenset((4,)))
    logits = torch.randn(1, VOCAB)
    assert torch.equal(adjust(logits, table, torch.tensor([2]), torch.tensor([[5, 3]])), logits)
