"""Tokens drawn by our kernels equal those drawn by torch."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.core.request import SamplingParams
from tandem.model.kernels.base import TORCH_KERNELS
from tandem.model.sampling.adjust import no_rules
from tandem.model.sampling.sampler import SamplingRows
from tests.kernels import IS_INTERPRETED, gpu_only, native_only, often_interpreted, ours
from tests.numerics import UNIT, assert_near, rounding


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_tokens", [100] if IS_INTERPRETED else [50, 100, 1000])
@pytest.mark.parametrize("spread", [3.0] if IS_INTERPRETED else [0.0, 3.0, 20.0])
@pytest.mark.parametrize(
    "step", often_interpreted([0.0, 0.5], [0.5]), ids=["all differ", "many are equal"]
)
def test_drawing(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, spread: float, step: float
) -> None:
    """Draw with mixtures of filters, and greedily in two rows. Each row has two places: flat, as
    from a model, and peaked."""
    if IS_INTERPRETED:
        from tandem.model.kernels.gpu import sample

        monkeypatch.setattr(sample, "TILE", 64)
    settings, logits = to_draw(num_tokens, spread, step)
    rows = SamplingRows.of(settings, torch.device("cpu"))
    indices = torch.arange(len(settings)).unsqueeze(1) * 3 + torch.tensor([0, 200_000])
    got, wanted = (
        ours().sample_tokens(logits, rows, indices),
        TORCH_KERNELS.sample_tokens(logits, rows, indices),
    )
    assert got.tolist() == wanted.tolist()


def to_draw(num_tokens: int, spread: float, step: float) -> tuple[list[SamplingParams], Tensor]:
    """Return the settings of rows, of which the first two are greedy, and logits of two places
    each."""
    ways = itertools.product((0, 7, 60), (1.0, 0.9, 1e-6))
    filters = [(k, p, m) for (k, p), m in zip(ways, itertools.cycle((0.0, 0.05)), strict=False)]
    asked = [(0.0, filters[0]), (0.0, filters[-1]), *((1.2, one) for one in filters)]
    settings = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=2**40 * i + 7)
        for i, (t, (k, p, m)) in enumerate(asked)
    ]
    logits = spread * normal(len(settings), 2, num_tokens, seed=num_tokens)
    if step:
        logits = (logits / step).round() * step
    logits[::5, :, ::3] = -torch.inf
    logits[1::7] = 0.0
    logits[1::7, :, ::2] = -0.0
    return settings, logits


@native_only
def test_many_draws_are_those_of_torch() -> None:
    """Draw from vocabularies up to DeepSeek-V3's size, also with logits that are not contiguous."""
    for num_tokens, num_rows in ((2048, 500), (129_280, 4)):
        settings = [
            SamplingParams(temperature=0.8, top_k=k, top_p=p, seed=i)
            for i in range(num_rows // 2)
            for k, p in ((0, 1.0), (50, 0.95))
        ]
        rows = SamplingRows.of(settings, torch.device("cpu"))
        wide = 2 * normal(num_rows, 4, num_tokens + 3, seed=num_tokens)
        logits, indices = wide[..., 3:], torch.arange(4) + torch.zeros(num_rows, 1).long()
        got, wanted = (
            ours().sample_tokens(logits, rows, indices),
            TORCH_KERNELS.sample_tokens(logits, rows, indices),
        )
        assert torch.equal(got, wanted)
        assert torch.equal(
            ours().sample_tokens(logits[2:3, 1:2], one(rows, 2), indices[2:3, 1:2]), got[2:3, 1:2]
        )


def one(rows: SamplingRows, row: int) -> SamplingRows:
    fields = ("temperature_B", "top_k_B", "top_p_B", "min_p_B", "seed_B")
    return replace(rows, **{name: getattr(rows, name)[row : row + 1] for name in fields})


@pytest.mark.parametrize("num_tokens", [100] if IS_INTERPRETED else [50, 1000])
def test_what_filters_leave(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    if IS_INTERPRETED:
        from tandem.model.kernels.gpu import sample

        monkeypatch.setattr(sample, "TILE", 128)
    for spread in (3.0,) if IS_INTERPRETED else (0.0, 3.0, 20.0):
        settings, logits = to_draw(num_tokens, spread, 0.0)
        sampled = SamplingRows.of(settings[2:], torch.device("cpu"))
        left = ours().filtered_log_probs(logits[2:], sampled)
        told = TORCH_KERNELS.filtered_log_probs(logits[2:], sampled)
        check_log_probs(left, told)


def check_log_probs(got: Tensor, wanted: Tensor) -> None:
    """Compare log probabilities that both have the error explained in
    tests/unit/test_logprobs.py."""
    size = float(wanted[wanted.isfinite()].abs().max())
    bound = rounding(wanted.shape[-1], 1.0) + 2 * UNIT[torch.float32] * size
    assert_near(got, wanted, bound)


@pytest.mark.parametrize("num_tokens", [9, 20])
def test_equals_lie_on_an_edge_that_is_in_several_splits(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """The first of equal values are kept, whatever split they are in."""
    if IS_INTERPRETED:
        from tandem.model.kernels.gpu import sample

        monkeypatch.setattr(sample, "TILE", 8)
    logits = torch.zeros(4, 1, num_tokens)
    logits[:, :, [1, -1]] = 0.5
    logits[-1, :, 3:6] = -torch.inf
    asked = (num_tokens // 2 + 1, 1.0), (0, 0.47), (num_tokens - 2, 0.62), (num_tokens - 1, 0.999)
    settings = [SamplingParams(temperature=1.0, top_k=k, top_p=p, seed=1) for k, p in asked]
    rows = SamplingRows.of(settings, torch.device("cpu"))
    left, told = (one.filtered_log_probs(logits, rows) for one in (ours(), TORCH_KERNELS))
    check_log_probs(left, told)


@gpu_only
def test_the_largest_is_a_number_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of equal values wins, in whatever split it lies."""
    from tandem.model.kernels.gpu import sample

    monkeypatch.setattr(sample, "TILE", 8)
    logits, nan, low = torch.zeros(2, 4, 20), torch.nan, -torch.inf
    logits[0, 0, [9, 17]], logits[0, 1, 3:], logits[0, 2], logits[0, 3] = 2.0, nan, low, nan
    logits[1, 0, :9], logits[1, 1], logits[1, 1, 19], logits[1, 2, 0] = nan, nan, low, -0.0
    logits[1, 3] = torch.arange(20)
    assert sample.argmax_tokens(logits).tolist() == [[9, 0, 0, 0], [9, 19, 0, 19]]
    assert sample.argmax_tokens(logits[1]).tolist() == [9, 19, 0, 19]
    assert sample.argmax_tokens(torch.zeros(3, 1)).tolist() == [0, 0, 0]


@native_only
def test_drawing_from_nothing_ends() -> None:
    settings = [SamplingParams(temperature=1.0, top_k=k, top_p=0.9, seed=1) for k in (0, 5)]
    rows = SamplingRows.of(settings, torch.device("cpu"))
    for nothing in (torch.nan, -torch.inf):
        logits, indices = torch.full((2, 1, 40), nothing), torch.zeros(2, 1, dtype=torch.int64)
        assert ((got := ours().sample_tokens(logits, rows, indices)) >= 0).all() and (
            got < 40
        ).all()
        assert ours().filtered_log_probs(logits, rows).shape == logits.shape


@native_only
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("num_tokens", [5, 200, 4096])
def test_rules_give_the_bits_of_torchs(num_tokens: int, num_drafts: int) -> None:
    """Logit rules give the same bits as torch's, also for a token that is drafted twice, and if
    only some drafts are seen."""
    rules, made = no_rules(3, num_tokens, torch.device("cpu")), torch.Generator().manual_seed(0)
    drawn = replace(
        rules,
        in_prompt_BV=torch.rand(3, num_tokens, generator=made) < 0.3,
        ends_BV=torch.rand(3, num_tokens, generator=made) < 0.1,
        count_BV=torch.randint(0, 4, (3, num_tokens), generator=made).int(),
        bias_BV=torch.randn(3, num_tokens, generator=made),
        repetition_B=torch.rand(3, generator=made) + 0.5,
        presence_B=torch.randn(3, generator=made),
        frequency_B=torch.randn(3, generator=made),
        min_tokens_B=torch.tensor([0, 3, 7]),
    )
    logits, num_output = 5 * normal(3, num_tokens, seed=1), torch.tensor([0, 2, 5])
    drafts = torch.randint(0, num_tokens, (3, num_drafts), generator=made)
    for seen in ((), (torch.rand(3, num_drafts, generator=made) < 0.5,)):
        given = logits, drawn, num_output, drafts, *seen
        assert torch.equal(ours().adjust(*given), TORCH_KERNELS.adjust(*given))
    assert torch.equal(ours().adjust(logits, rules, num_output, drafts), logits)
