"""Rejection sampling is lossless: tests of the joint distribution of several tokens over many
steps, and of the accepted length that theory predicts. Deliberately wrong rules are detected."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from tandem.core.request import (
    REJECTION,
    REJECTION_GREEDY,
    RELAXED,
    STRICT,
    SamplingParams,
    TokenBias,
)
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.sampling.acceptance import ACCEPTANCE_RULES, RULE_NUMBERS, rejection
from tandem.model.sampling.acceptance.base import VerifyInput
from tandem.model.sampling.sampler import COIN, DRAFT, RESIDUAL, gumbel, sample, uniform
from tests.markov import VOCAB, World, chain, check_tokens, judged_by, one_step, tell, verify_input
from tests.unit.test_sampling import sampling_rows

NUM_ROWS, FEW_ROWS = 30_000, 15_000
WORLD = World()
PLAIN = SamplingParams(temperature=1.0)
SETTINGS = [
    PLAIN,
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=1.2, top_k=4, top_p=0.95, min_p=0.1),
    SamplingParams(
        temperature=0.9,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=(TokenBias(2, 0.5),),
    ),
]


def limits(num_drafts: int, num_rows: int = NUM_ROWS) -> Tensor:
    """Return draft limits. Half of the rows may use all drafts (or one more), the others any
    smaller number."""
    row_B = torch.arange(num_rows)
    return torch.where(row_B % 2 == 0, num_drafts + row_B // 2 % 2, row_B // 2 % (num_drafts + 1))


@pytest.mark.parametrize("kind", [REJECTION, REJECTION_GREEDY])
@pytest.mark.parametrize("s", SETTINGS, ids=lambda s: f"t{s.temperature}")
@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_three_tokens_follow_the_exact_joint_distribution(
    kind: str, s: SamplingParams, num_drafts: int
) -> None:
    limit_B = limits(num_drafts, FEW_ROWS)
    told = tell(WORLD, s, (kind,), limit_B, num_drafts=num_drafts, num_tokens=3)
    check_tokens(told, WORLD, s)


@pytest.mark.parametrize("s", [SETTINGS[1], SETTINGS[2]], ids=lambda s: f"t{s.temperature}")
def test_later_tokens_too_where_noise_was_used_before(s: SamplingParams) -> None:
    """Given token 3, tokens 4 and 5 are distributed like a chain that starts there, with renumbered
    tokens."""
    told = tell(WORLD, s, (REJECTION,), limits(3), num_drafts=3, num_tokens=5)
    for start in range(VOCAB):
        rows = told[:, 2] == start
        if rows.sum() > 1000:
            roll = (torch.arange(VOCAB) + start) % VOCAB
            turned = World(WORLD.main_VV[roll][:, roll], WORLD.drafter_VV)
            check_tokens((told[rows][:, 3:] - start) % VOCAB, turned, s)


def test_a_chain_is_judged_as_transformers_judges_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare row by row. transformers gets our uniform draws, and our noise for the token after
    the drafts."""
    num_drafts, made = 3, list[Drafts]()
    seed_B = torch.arange(400)
    last_B, num_output_B = seed_B % VOCAB, 1 + seed_B % 7
    index_BN = num_output_B.unsqueeze(1) + torch.arange(num_drafts + 1)

    def drafting(world: World, view: DraftContext) -> Drafts:
        made.append(chain(num_drafts)(world, view))
        return made[0]

    rule_B = torch.full_like(seed_B, RULE_NUMBERS[REJECTION])
    asked = (REJECTION,), rule_B, sampling_rows(PLAIN, seed_B), last_B, num_output_B
    result = one_step(WORLD, *asked, torch.full_like(seed_B, num_drafts), drafting, num_drafts)
    coins_BN = uniform(seed_B.unsqueeze(1), index_BN[:, :-1], COIN).float()
    tokens_BN, q_BNV = made[0].tokens_BN, made[0].q_BNV
    assert q_BNV is not None
    logits_BN1V = WORLD.main_VV[torch.cat((last_B.unsqueeze(1), tokens_BN), 1)]
    nums = set()
    for row in range(len(seed_B)):
        num = int(result.num_accepted_B[row])

        def noisy(p_1V: Tensor, num_samples: int, row: int = row, num: int = num) -> Tensor:
            index_1 = index_BN[row : row + 1, num]
            return sample(p_1V.log(), seed_B[row : row + 1], index_1, RESIDUAL).unsqueeze(0)

        monkeypatch.setattr(torch, "rand_like", lambda _, row=row: coins_BN[row])
        monkeypatch.setattr(torch, "multinomial", noisy)
        own = slice(row, row + 1)
        theirs, num_matches = _speculative_sampling(
            tokens_BN[own], q_BNV[own].log(), num_drafts, logits_BN1V[own]
        )
        assert num_matches == num
        assert theirs[0].tolist() == result.tokens_BE[row, : num + 1].tolist()
        nums.add(num)
    assert nums == {*range(num_drafts + 1)}


def test_kinds_of_every_sort_share_a_batch() -> None:
    """Each kind's rows keep their exact distribution; rows of temperature 0 are greedy."""
    kinds = (REJECTION_GREEDY, STRICT, REJECTION, RELAXED)
    row_B = torch.arange(4 * NUM_ROWS)
    rule_B = torch.tensor([RULE_NUMBERS[kind] for kind in kinds])[row_B % 4]
    heat_B = torch.where((rule_B == RULE_NUMBERS[RELAXED]) | (row_B % 40 < 4), 0.0, 1.0)
    told = tell(
        WORLD,
        PLAIN,
        kinds,
        limits(2, len(row_B)),
        num_drafts=2,
        num_tokens=2,
        rule_B=rule_B,
        temperature_B=heat_B,
    )
    for kind in (STRICT, REJECTION, REJECTION_GREEDY):
        check_tokens(told[(rule_B == RULE_NUMBERS[kind]) & (heat_B > 0)], WORLD, PLAIN)
    first = WORLD.main_VV[0].argmax()
    greedy = torch.stack((first, WORLD.main_VV[first].argmax()))
    assert (told[heat_B == 0] == greedy).all()


def without_drafts(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return p_BV


def residual_at_the_limit(known: VerifyInput, p_BN1V: Tensor, place_B: Tensor) -> Tensor:
    unlimited = judged_by(known, limit_B=torch.full_like(known.acceptance.limit_B, 9))
    return right_last_token(unlimited, p_BN1V, place_B)


def coin_of_the_seed_alone(seed: Tensor, output_index: Tensor, stream: int) -> Tensor:
    return uniform(seed, torch.zeros_like(output_index), stream)


right_last_token = rejection._last_token
WRONG_RULES = {
    "p instead of the residual": ("residual", without_drafts),
    "the draft's noise for the residual": ("RESIDUAL", DRAFT),
    "the draft's noise for the coin": ("COIN", DRAFT),
    "the coin's noise for the residual": ("RESIDUAL", COIN),
    "the same coin at every place": ("uniform", coin_of_the_seed_alone),
    "the residual where nothing was rejected": ("_last_token", residual_at_the_limit),
}


@pytest.mark.parametrize(("name", "wrong"), WRONG_RULES.values(), ids=WRONG_RULES.keys())
def test_a_wrong_rule_is_found_out(
    name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, name, wrong)
    told = tell(WORLD, PLAIN, (REJECTION,), limits(2), num_drafts=2, num_tokens=3)
    with pytest.raises(AssertionError):
        check_tokens(told, WORLD, PLAIN)


def test_drafts_that_were_not_drawn_from_q_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the drafter's best tokens, judged as if they had been drawn."""
    wrong = replace(rejection.REJECTION, sample_draft=_best_with_q)
    monkeypatch.setitem(ACCEPTANCE_RULES, REJECTION, wrong)
    told = tell(WORLD, PLAIN, (REJECTION,), limits(2), num_drafts=2, num_tokens=3)
    with pytest.raises(AssertionError):
        check_tokens(told, WORLD, PLAIN)


def _best_with_q(adjusted_BV: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return adjusted_BV.argmax(1), adjusted_BV.softmax(1)


@pytest.mark.parametrize(
    "num_drafts",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4],
)
@pytest.mark.parametrize("overlap", [0.2, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("kind", [REJECTION, REJECTION_GREEDY])
def test_the_accepted_length_is_what_theory_expects(
    kind: str, overlap: float, num_drafts: int
) -> None:
    """If sum min(p, q) = a at every place, a step emits (1 - a^(n + 1)) / (1 - a) tokens. For
    greedy rejection, a is the p of q's best token."""
    shared = torch.tensor([0.4, 0.3, 0.3, 0.0, 0.0])
    p, q = (overlap * shared + (1 - overlap) * torch.eye(VOCAB)[i] for i in (3, 4))
    if kind == REJECTION_GREEDY:
        p = torch.full((VOCAB,), (1 - overlap) / (VOCAB - 1))
        p[1], q = overlap, torch.eye(VOCAB)[1]
    world = World(p.log().expand(VOCAB, -1), q.log().expand(VOCAB, -1))
    row_B = torch.arange(NUM_ROWS)
    result = one_step(
        world,
        (kind,),
        torch.full_like(row_B, RULE_NUMBERS[kind]),
        sampling_rows(PLAIN, row_B),
        torch.zeros_like(row_B),
        row_B % 50 + 1,
        torch.full_like(row_B, num_drafts),
        chain(num_drafts),
        num_drafts,
    )
    emitted_B = (result.num_accepted_B + 1).double()
    expected = (1 - overlap ** (num_drafts + 1)) / (1 - overlap)
    error = emitted_B.std() / NUM_ROWS**0.5
    assert abs(emitted_B.mean() - expected) < 4 * error, (emitted_B.mean(), expected)


def test_a_token_that_p_rules_out_never_passes_however_small_q_is() -> None:
    """In float32 u * q is 0, and 0 <= 0 would accept the token."""
    row_B = torch.arange(2000)
    logits = torch.zeros(2000, 2, VOCAB)
    logits[:, 0, 3] = float("-inf")
    known = verify_input(
        torch.full((2000, 1), 3),
        logits,
        sampling_rows(PLAIN, row_B),
        num_output_B=row_B,
        limit_B=torch.ones_like(row_B),
        q_BNV=torch.full((2000, 1, VOCAB), 1e-38),
    )
    result = rejection.accept_drafts(known)
    assert result.num_accepted_B.sum() == 0
    assert (result.tokens_BE[:, 0] != 3).all()


def test_an_empty_residual_falls_back_to_p() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
    q = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    expected = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.25]])
    assert torch.equal(rejection.residual(p, q), expected)


def test_streams_of_noise_do_not_know_each_other() -> None:
    seed, index = torch.arange(400), torch.arange(400) % 7
    noises = [gumbel(seed, index, 50, stream).flatten() for stream in range(4)]
    assert torch.corrcoef(torch.stack(noises)).triu(1).abs().max() < 0.02
    coin = uniform(seed, index, COIN)
    assert coin.dtype == torch.float64 and coin.min() > 0 and coin.max() < 1
    first = gumbel(seed, index, 1, RESIDUAL).flatten()
    assert abs(torch.corrcoef(torch.stack((coin.float(), first)))[0, 1]) < 0.2
