"""Acceptance rules by name, and the functions that apply each row's rule.

Shape legend: B rows, N drafts, Q nodes, M drafts so far, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from tandem.core import request
from tandem.model.network.tree import Tree
from tandem.model.sampling.acceptance.base import (
    AcceptanceRule,
    SampledDraft,
    VerifyInput,
    VerifyResult,
)
from tandem.model.sampling.acceptance.rejection import REJECTION, REJECTION_GREEDY
from tandem.model.sampling.acceptance.relaxed import RELAXED, RELAXED_LOG_PROBS
from tandem.model.sampling.acceptance.strict import STRICT
from tandem.model.sampling.acceptance.typical import TYPICAL
from tandem.model.sampling.ranking import TopCandidates
from tandem.model.sampling.sampler import SamplingRows, apply_rules, apply_rules_at_places

ACCEPTANCE_RULES: dict[str, AcceptanceRule] = {
    request.STRICT: STRICT,
    request.RELAXED: RELAXED,
    request.RELAXED_LOG_PROBS: RELAXED_LOG_PROBS,
    request.REJECTION: REJECTION,
    request.REJECTION_GREEDY: REJECTION_GREEDY,
    request.TYPICAL: TYPICAL,
}
RULE_NUMBERS = {name: number for number, name in enumerate(ACCEPTANCE_RULES)}
"""Number of each acceptance rule in ``rule_B``; strict is 0."""


def accept_drafts(rule_names: Collection[str], verify_input: VerifyInput) -> VerifyResult:
    """Verify the drafts of each row by the row's acceptance rule.

    ``rule_names`` are the rules that occur in the batch.
    """
    result = ACCEPTANCE_RULES[request.STRICT].accept_drafts(verify_input)
    for name in _ordered(rule_names):
        if name != request.STRICT:
            other = ACCEPTANCE_RULES[name].accept_drafts(verify_input)
            result = other.where(verify_input.acceptance.rule_B == RULE_NUMBERS[name], result)
    return result


def sample_draft(
    rule_names: Collection[str],
    rule_B: Tensor,
    logits_BV: Tensor,
    sampling: SamplingRows,
    num_output_B: Tensor,
    drafts_BN: Tensor,
) -> SampledDraft:
    """Sample the draft that follows ``drafts_BN`` from the drafter's raw logits.

    Returns:
        The draft [B] of each row, chosen by the row's acceptance rule, and the distribution [B, V]
        that it was sampled from. The latter is None if no rule in ``rule_names`` needs it.
    """
    adjusted_BV = apply_rules(
        logits_BV=logits_BV, rows=sampling, num_output_B=num_output_B, drafts_BN=drafts_BN
    )
    output_index_B = num_output_B + drafts_BN.shape[1]
    first, *others = _ordered(rule_names)
    base = ACCEPTANCE_RULES[first].sample_draft
    tokens_B, q_BV = base(adjusted_BV, sampling, output_index_B)
    for name in others:
        sample = ACCEPTANCE_RULES[name].sample_draft
        if sample is not base:
            own_B, own_q_BV = sample(adjusted_BV, sampling, output_index_B)
            tokens_B = torch.where(rule_B == RULE_NUMBERS[name], own_B, tokens_B)
            q_BV = q_BV if own_q_BV is None else own_q_BV
    return tokens_B, q_BV


def top_candidates(
    rule_names: Collection[str],
    rule_B: Tensor,
    logits_BQV: Tensor,
    sampling: SamplingRows,
    num_output_B: Tensor,
    drafts_BM: Tensor,
    nodes: Tree,
    num_candidates: int,
) -> TopCandidates:
    """Rank the tokens that may follow ``nodes`` by each row's acceptance rule.

    Args:
        rule_names: Rules that occur in the batch.
        rule_B: Number of each row's rule.
        logits_BQV: Raw logits of the drafter at the Q nodes.
        sampling: Sampling settings.
        num_output_B: Number of tokens emitted before this step.
        drafts_BM: Drafts so far.
        nodes: The nodes. In their ancestor masks, bit 0 is the last known token and bits 1..M are
            ``drafts_BM``.
        num_candidates: Number of tokens to return per node.
    """
    adjusted_BQV = apply_rules_at_places(
        logits_BN1V=logits_BQV,
        rows=sampling,
        num_output_B=num_output_B,
        drafts_BN=drafts_BM,
        tree=nodes,
    )
    first, *others = _ordered(rule_names)
    base = ACCEPTANCE_RULES[first].top_candidates
    top = base(adjusted_BQV, sampling, num_output_B, nodes, num_candidates)
    for name in others:
        if (choose := ACCEPTANCE_RULES[name].top_candidates) is not base:
            own = choose(adjusted_BQV, sampling, num_output_B, nodes, num_candidates)
            top = own.where(rule_B == RULE_NUMBERS[name], top)
    return top


def _ordered(rule_names: Collection[str]) -> list[str]:
    return sorted(rule_names, key=RULE_NUMBERS.__getitem__)
