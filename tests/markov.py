"""A main model and a drafter whose next token depends only on the last one.

They are stepped as the decode engine steps. Noise is a function of (seed, output index), so a place
may be drafted several times.

Shape legend: B rows, N drafts, N1 = N + 1 places, V vocabulary, T emitted tokens.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.core.request import Request, SamplingParams
from tandem.model.checkpoint.tensors import select_rows
from tandem.model.drafters.base import DraftContext, Drafts
from tandem.model.network.tree import Tree, build_tree
from tandem.model.sampling.acceptance import (
    RULE_NUMBERS,
    accept_drafts,
    sample_draft,
    top_candidates,
)
from tandem.model.sampling.acceptance.base import AcceptanceRows, VerifyInput, VerifyResult
from tandem.model.sampling.adjust import count_emitted, no_rules, set_rules
from tandem.model.sampling.sampler import SamplingRows, apply_rules_at_places, draw_at_places
from tests.unit.test_sampling import check_chi_square, filtered, obvious, sampling_rows

VOCAB = 5
CPU = torch.device("cpu")
START = 0
"""The token that prefill emitted: output index 0."""
_MAIN, _DRAFTER = (
    torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)
)


@dataclass(frozen=True)
class World:
    """Logits [V, V] of both models by last token. The drafter is similar to the main model, not
    equal."""

    main_VV: Tensor = _MAIN
    drafter_VV: Tensor = _MAIN * 0.6 + _DRAFTER * 0.6


def verify_input(
    drafts_BN: Tensor,
    adjusted_BN1V: Tensor,
    sampling: SamplingRows,
    *,
    num_output_B: Tensor,
    limit_B: Tensor,
    q_BNV: Tensor | None = None,
    rule_B: Tensor | None = None,
    tree: Tree | None = None,
    num_B: Tensor | None = None,
) -> VerifyInput:
    """Build the input of verification, without thinking."""
    return VerifyInput(
        drafts_BN=drafts_BN,
        q_BNV=q_BNV,
        adjusted_BN1V=adjusted_BN1V,
        targets_BN1=draw_at_places(adjusted_BN1V, sampling, num_output_B, tree),
        sampling=sampling,
        acceptance=AcceptanceRows(
            rule_B=torch.zeros_like(limit_B) if rule_B is None else rule_B,
            limit_B=limit_B,
            bounds_B2=torch.tensor([[1.0, 0.0]]).expand(len(limit_B), -1),
        ),
        num_output_B=num_output_B,
        thinking_B=torch.zeros_like(limit_B, dtype=torch.bool),
        think_ids=None,
        tree=tree,
        num_B=num_B,
    )


def judged_by(known: VerifyInput, **changes: Tensor) -> VerifyInput:
    """Return the same input with other fields of AcceptanceRows."""
    return replace(known, acceptance=replace(known.acceptance, **changes))


Drafting = Callable[[World, DraftContext], Drafts]
"""Draft function of a drafter in this world."""


def chain(num_drafts: int) -> Drafting:
    def draft(world: World, context: DraftContext) -> Drafts:
        return context.draft_chain(
            num_drafts, lambda _, last_B1: world.drafter_VV[last_B1.squeeze(1)]
        )

    return draft


def one_step(
    world: World,
    kinds: tuple[str, ...],
    rule_B: Tensor,
    sampling: SamplingRows,
    last_B: Tensor,
    num_output_B: Tensor,
    limit_B: Tensor,
    drafting: Drafting,
    depth: int,
) -> VerifyResult:
    """Draft and verify one step. ``depth`` is that of the draft tree."""
    many = (kinds, rule_B), (sampling, num_output_B)
    context = DraftContext(
        *(last_B.unsqueeze(1), num_output_B, last_B, last_B > 0, last_B, None),
        sample_draft=lambda logits_BV, drafts_BN: sample_draft(
            *many[0], logits_BV, *many[1], drafts_BN
        ),
        top_candidates=lambda logits_BQV, *of: top_candidates(*many[0], logits_BQV, *many[1], *of),
    )
    drafts = drafting(world, context)
    tree = None if drafts.parents_BN is None else build_tree(drafts.parents_BN, depth)
    logits_BN1V = world.main_VV[torch.cat((last_B.unsqueeze(1), drafts.tokens_BN), 1)]
    known = verify_input(
        drafts.tokens_BN,
        apply_rules_at_places(logits_BN1V, sampling, num_output_B, drafts.tokens_BN, tree),
        sampling,
        num_output_B=num_output_B,
        limit_B=limit_B,
        q_BNV=drafts.q_BNV,
        rule_B=rule_B,
        tree=tree,
        num_B=drafts.num_B,
    )
    return accept_drafts(kinds, known)


def tell(
    world: World,
    s: SamplingParams,
    kinds: tuple[str, ...],
    limit_B: Tensor,
    *,
    num_drafts: int,
    num_tokens: int,
    rule_B: Tensor | None = None,
    temperature_B: Tensor | None = None,
    drafting: Drafting | None = None,
) -> Tensor:
    """Return ``num_tokens`` tokens [B, T] after START, with a different seed for each row. Drafts
    are a chain, or trees that are ``num_drafts`` deep."""
    drafting = drafting or chain(num_drafts)
    seed_B = torch.arange(len(limit_B))
    rule_B = torch.full_like(seed_B, RULE_NUMBERS[kinds[0]]) if rule_B is None else rule_B
    sampling = sampling_rows(s, seed_B)
    if temperature_B is not None:
        sampling = replace(sampling, temperature_B=temperature_B)
    if s.adjusts_logits:
        table = no_rules(1, VOCAB, CPU)
        set_rules(table, 0, Request("r", (1,), sampling=s), (START,), frozenset())
        sampling = replace(sampling, rules=select_rows(table, torch.zeros_like(seed_B)))
    told_BT = torch.zeros(len(seed_B), num_tokens + num_drafts + 1, dtype=torch.int64)
    last_B, num_output_B = torch.full_like(seed_B, START), torch.ones_like(seed_B)
    while (num_output_B <= num_tokens).any():
        result = one_step(
            *(world, kinds, rule_B, sampling, last_B, num_output_B, limit_B),
            *(drafting, num_drafts),
        )
        start_B1 = (num_output_B - 1).clamp(max=num_tokens).unsqueeze(1)
        told_BT.scatter_(1, start_B1 + torch.arange(num_drafts + 1), result.tokens_BE)
        last_B = result.tokens_BE.gather(1, result.num_accepted_B.unsqueeze(1)).squeeze(1)
        num_output_B = num_output_B + result.num_accepted_B + 1
        if sampling.rules is not None:
            emitted_B = result.num_accepted_B + 1
            count_emitted(sampling.rules, seed_B, result.tokens_BE, emitted_B)
    return told_BT[:, :num_tokens]


def exact(world: World, s: SamplingParams, num_tokens: int) -> list[float]:
    """Return the probability of every sequence of tokens, in order of ``sequence_number``."""

    def next_probs(history: list[int]) -> list[float]:
        return filtered(obvious(world.main_VV[history[-1]], [1], history, s), s)

    def probability(tokens: tuple[int, ...]) -> float:
        product, history = 1.0, [START]
        for token in tokens:
            product *= next_probs(history)[token]
            history.append(token)
        return product

    return [probability(t) for t in itertools.product(range(VOCAB), repeat=num_tokens)]


def check_tokens(
    told_BT: Tensor, world: World, s: SamplingParams, check: Callable = check_chi_square
) -> None:
    """Test the joint distribution of all T tokens with a chi-square test."""
    weights = VOCAB ** torch.arange(told_BT.shape[1] - 1, -1, -1)
    counts = (told_BT * weights).sum(1).bincount(minlength=VOCAB ** told_BT.shape[1])
    check(counts.tolist(), exact(world, s, told_BT.shape[1]))
