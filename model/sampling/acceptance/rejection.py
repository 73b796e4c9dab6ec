"""Rejection sampling: a draft x sampled from q is accepted with probability min(1, p(x) / q(x)).

The output distribution is exactly p. The tokens depend on the drafts too, so that the seed alone
does not determine them. At each output index, separate noise streams are used to sample the draft,
to decide its acceptance, and to sample the token after a rejection. A later step may reuse the
noise of a position that was not reached, because that noise had no effect.
Shape legend: B rows, N drafts of this step, N1 = N + 1 positions, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.model.sampling.acceptance import recursive, strict
from tandem.model.sampling.acceptance.base import (
    AcceptanceRule,
    SampledDraft,
    VerifyInput,
    VerifyResult,
)
from tandem.model.sampling.ranking import draw_without_replacement, top_by_logits
from tandem.model.sampling.sampler import COIN, DRAFT, RESIDUAL, SamplingRows, sample, uniform


def accept_drafts(verify_input: VerifyInput) -> VerifyResult:
    """Accept drafts by p/q and sample one token after them. Rows of temperature 0 use strict
    acceptance.

    After a rejection the token comes from the residual norm(max(p - q, 0)), otherwise from p.
    """
    greedy = strict.accept_drafts(verify_input)
    rows = verify_input.sampling
    if rows.all_greedy:
        return greedy
    if verify_input.tree is not None:
        return recursive.accept_drafts(verify_input).where(rows.temperature_B > 0, greedy)
    p_BN1V = rows.sampler.filtered_log_probs(verify_input.adjusted_BN1V, rows).exp()
    num_accepted_B = _num_accepted(verify_input, p_BN1V)
    last_B1 = _last_token(verify_input, p_BN1V, num_accepted_B).unsqueeze(1)
    tokens_BN1 = torch.cat((verify_input.drafts_BN, last_B1), 1)
    tokens_BN1 = tokens_BN1.scatter(1, num_accepted_B.unsqueeze(1), last_B1)
    return VerifyResult(tokens_BN1, num_accepted_B).where(rows.temperature_B > 0, greedy)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return max(p - q, 0), not normalised, or p in rows where rounding leaves nothing."""
    rest_BV = (p_BV - q_BV).clamp(min=0)
    return torch.where(rest_BV.sum(1, keepdim=True) > 0, rest_BV, p_BV)


def _num_accepted(verify_input: VerifyInput, p_BN1V: Tensor) -> Tensor:
    """Return the number of accepted drafts per row.

    A draft is accepted if u * q <= p for a uniform random number u. Computes in float64: if the
    product underflowed to 0, tokens of probability 0 would be accepted.
    """
    drafts_BN1 = verify_input.drafts_BN.unsqueeze(2)
    p_BN = p_BN1V[:, :-1].gather(2, drafts_BN1).squeeze(2).double()
    q_BN = torch.ones_like(p_BN)
    if verify_input.q_BNV is not None:
        q_BN = verify_input.q_BNV.gather(2, drafts_BN1).squeeze(2).double()
    place_N = torch.arange(p_BN.shape[1], device=p_BN.device)
    index_BN = verify_input.num_output_B.unsqueeze(1) + place_N
    u_BN = uniform(verify_input.sampling.seed_B.unsqueeze(1), index_BN, COIN)
    passes_BN = (q_BN > 0) & (u_BN * q_BN <= p_BN)
    return passes_BN.long().cumprod(1).sum(1).minimum(verify_input.acceptance.limit_B)


def _last_token(verify_input: VerifyInput, p_BN1V: Tensor, place_B: Tensor) -> Tensor:
    """Sample the token [B] at ``place_B``, the position after the accepted drafts."""
    p_BV = _at(p_BN1V, place_B)
    num_drafts = verify_input.drafts_BN.shape[1]
    rest_BV = p_BV
    if num_drafts > 0:
        was_rejected_B = place_B < verify_input.acceptance.limit_B.clamp(max=num_drafts)
        q_BV = _draft_probs(verify_input, p_BV, place_B.clamp(max=num_drafts - 1))
        rest_BV = torch.where(was_rejected_B.unsqueeze(1), residual(p_BV, q_BV), p_BV)
    index_B = verify_input.num_output_B + place_B
    return sample(
        log_p=rest_BV.log(),
        seed=verify_input.sampling.seed_B,
        output_index=index_B,
        stream=RESIDUAL,
    )


def _draft_probs(verify_input: VerifyInput, p_BV: Tensor, place_B: Tensor) -> Tensor:
    """Return q [B, V] at position ``place_B`` of each row; one-hot for deterministic drafts."""
    if verify_input.q_BNV is not None:
        return _at(verify_input.q_BNV, place_B)
    draft_B1 = verify_input.drafts_BN.gather(1, place_B.unsqueeze(1))
    return torch.zeros_like(p_BV).scatter(1, draft_B1, 1.0)


def _at(x_BNV: Tensor, place_B: Tensor) -> Tensor:
    index_B1V = place_B.view(-1, 1, 1).expand(-1, 1, x_BNV.shape[2])
    return x_BNV.gather(1, index_B1V).squeeze(1)


def sample_from_q(
    adjusted_BV: Tensor, sampling: SamplingRows, output_index_B: Tensor
) -> SampledDraft:
    """Sample drafts from q, the drafter's distribution after the request's filters. Return them
    with q, which is None if all rows are greedy."""
    greedy_B = adjusted_BV.argmax(-1)
    if sampling.all_greedy:
        return greedy_B, None
    log_q_BV = sampling.sampler.filtered_log_probs(adjusted_BV.unsqueeze(1), sampling).squeeze(1)
    drawn_B = sample(
        log_p=log_q_BV, seed=sampling.seed_B, output_index=output_index_B, stream=DRAFT
    )
    return torch.where(sampling.temperature_B > 0, drawn_B, greedy_B), log_q_BV.exp()


def argmax_draft(
    adjusted_BV: Tensor, sampling: SamplingRows, output_index_B: Tensor
) -> SampledDraft:
    """Return the drafter's most likely token."""
    return adjusted_BV.argmax(-1), None


REJECTION = AcceptanceRule(sample_from_q, draw_without_replacement, accept_drafts)
REJECTION_GREEDY = AcceptanceRule(
    argmax_draft,
    top_by_logits,
    lambda verify_input: accept_drafts(replace(verify_input, q_BNV=None)),
)
"""Rejection sampling for deterministic drafts: q is 1 at the draft."""
