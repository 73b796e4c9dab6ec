"""Kinds of acceptance by name.

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
"""What stands for a kind in ``rule_B``; strict is 0."""


def accept_drafts(rule_names: Collection[str], verify_input: VerifyInput) -> VerifyResult:
    """The verdict of each row's own kind; ``rule_names`` are the names of all."""
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
    """The draft [B] after ``drafts_BN`` from the drafter's raw ``logits_BV``, as each row's kind
    picks it, and for ``VerifyInput`` what it was drawn from [B, V] if a row's kind needs that."""
    adjusted_BV = apply_rules(logits_BV, sampling, num_output_B, drafts_BN)
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
    """The tokens that may follow ``nodes``, by the drafter's raw ``logits_BQV``, as each row's kind
    ranks them. The nodes' bits are of the last known token and ``drafts_BM``."""
    adjusted_BQV = apply_rules_at_places(logits_BQV, sampling, num_output_B, drafts_BM, nodes)
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
