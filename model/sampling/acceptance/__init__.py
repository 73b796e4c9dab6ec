"""Kinds of acceptance by name.

Shape legend: B rows, N drafts, Q nodes, M drafts so far, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from tandem.core import request
from tandem.model.network.tree import Tree
from tandem.model.sampling.acceptance.base import Evidence, Kind, Picked, Verdict
from tandem.model.sampling.acceptance.rejection import REJECTION, REJECTION_GREEDY
from tandem.model.sampling.acceptance.relaxed import RELAXED, RELAXED_LOG_PROBS
from tandem.model.sampling.acceptance.strict import STRICT
from tandem.model.sampling.acceptance.typical import TYPICAL
from tandem.model.sampling.ranking import Ranked
from tandem.model.sampling.sampler import SamplingRows, adjusted, adjusted_places

KINDS: dict[str, Kind] = {
    request.STRICT: STRICT,
    request.RELAXED: RELAXED,
    request.RELAXED_LOG_PROBS: RELAXED_LOG_PROBS,
    request.REJECTION: REJECTION,
    request.REJECTION_GREEDY: REJECTION_GREEDY,
    request.TYPICAL: TYPICAL,
}
KIND_NUMBERS = {name: number for number, name in enumerate(KINDS)}
"""What stands for a kind in ``kind_B``; strict is 0."""


def judge(kinds: Collection[str], evidence: Evidence) -> Verdict:
    """The verdict of each row's own kind; ``kinds`` are the names of all."""
    verdict = KINDS[request.STRICT].judge(evidence)
    for name in _ordered(kinds):
        if name != request.STRICT:
            other = KINDS[name].judge(evidence)
            verdict = other.where(evidence.acceptance.kind_B == KIND_NUMBERS[name], verdict)
    return verdict


def pick_draft(
    kinds: Collection[str],
    kind_B: Tensor,
    logits_BV: Tensor,
    sampling: SamplingRows,
    num_output_B: Tensor,
    drafts_BN: Tensor,
) -> Picked:
    """The draft [B] after ``drafts_BN`` from the drafter's raw ``logits_BV``, as each row's kind
    picks it, and for ``Evidence`` what it was drawn from [B, V] if a row's kind needs that."""
    adjusted_BV = adjusted(logits_BV, sampling, num_output_B, drafts_BN)
    output_index_B = num_output_B + drafts_BN.shape[1]
    first, *others = _ordered(kinds)
    base = KINDS[first].pick
    tokens_B, q_BV = base(adjusted_BV, sampling, output_index_B)
    for name in others:
        pick = KINDS[name].pick
        if pick is not base:
            own_B, own_q_BV = pick(adjusted_BV, sampling, output_index_B)
            tokens_B = torch.where(kind_B == KIND_NUMBERS[name], own_B, tokens_B)
            q_BV = q_BV if own_q_BV is None else own_q_BV
    return tokens_B, q_BV


def rank_drafts(
    kinds: Collection[str],
    kind_B: Tensor,
    logits_BQV: Tensor,
    sampling: SamplingRows,
    num_output_B: Tensor,
    drafts_BM: Tensor,
    nodes: Tree,
    num_ranks: int,
) -> Ranked:
    """The tokens that may follow ``nodes``, by the drafter's raw ``logits_BQV``, as each row's kind
    ranks them. The nodes' bits are of the last known token and ``drafts_BM``."""
    adjusted_BQV = adjusted_places(logits_BQV, sampling, num_output_B, drafts_BM, nodes)
    first, *others = _ordered(kinds)
    base = KINDS[first].rank
    ranked = base(adjusted_BQV, sampling, num_output_B, nodes, num_ranks)
    for name in others:
        if (rank := KINDS[name].rank) is not base:
            own = rank(adjusted_BQV, sampling, num_output_B, nodes, num_ranks)
            ranked = own.where(kind_B == KIND_NUMBERS[name], ranked)
    return ranked


def _ordered(kinds: Collection[str]) -> list[str]:
    return sorted(kinds, key=KIND_NUMBERS.__getitem__)
