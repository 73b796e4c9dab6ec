"""Candidate tokens for draft trees: the most likely tokens, or tokens sampled without replacement.

Shape legend: B rows, Q nodes of each, K candidates per node, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.model.network.tree import Tree
from tandem.model.sampling.sampler import DRAFT, SamplingRows, gumbel

LOG_ZERO = float("-inf")
_NODE_SHIFT = 32


class TopCandidates(NamedTuple):
    """Tokens that may follow the nodes of a tree, in order of rank.

    Attributes:
        tokens_BQK: Candidate tokens of each node.
        log_probs_BQK: Log probability of each candidate given its node.
        scores_BQK: Score of each candidate's position in a tree, as a logarithm. A tree keeps the
            positions with the highest scores.
        q_BQV: Distribution that the candidates of the rows ``drawn_B`` were sampled from, without
            replacement. None if no row is sampled.
        drawn_B: True for rows whose candidates were sampled. None if no row is sampled.
    """

    tokens_BQK: Tensor
    log_probs_BQK: Tensor
    scores_BQK: Tensor
    q_BQV: Tensor | None = None
    drawn_B: Tensor | None = None

    def where(self, rows_B: Tensor, other: "TopCandidates") -> "TopCandidates":
        """Return this result in the rows where ``rows_B`` is True, and ``other`` elsewhere. At most
        one of the two may hold sampled candidates."""
        own_B, own = (rows_B, self) if self.drawn_B is not None else (~rows_B, other)
        drawn_B = None if own.drawn_B is None else own.drawn_B & own_B
        tokens, shares, worth = (
            torch.where(rows_B.view(-1, 1, 1), mine, two)
            for mine, two in zip(self[:3], other[:3], strict=True)
        )
        return TopCandidates(
            tokens_BQK=tokens,
            log_probs_BQK=shares,
            scores_BQK=worth,
            q_BQV=own.q_BQV,
            drawn_B=drawn_B,
        )


def top_by_logits(
    adjusted_BQV: Tensor, rows: SamplingRows, num_output_B: Tensor, nodes: Tree, num_candidates: int
) -> TopCandidates:
    """Return the candidates with the largest logits."""
    shares, tokens = adjusted_BQV.log_softmax(-1).topk(num_candidates)
    shares = shares.nan_to_num(nan=LOG_ZERO, neginf=LOG_ZERO).clamp(max=0)
    return TopCandidates(tokens, shares, shares)


def top_by_target_noise(
    adjusted_BQV: Tensor, rows: SamplingRows, num_output_B: Tensor, nodes: Tree, num_candidates: int
) -> TopCandidates:
    """Rank candidates by logits plus, in sampled rows, the noise that verification will use.

    The first candidate of a node is the draft that a chain would have. Each later one is the token
    that the main model would sample from these logits if the candidates before it were excluded.
    """
    if not rows.all_greedy:
        index_BQ = num_output_B.unsqueeze(1) + nodes.depth_BQ
        log_p_BQV = rows.sampler.filtered_log_probs(adjusted_BQV, rows)
        log_p_BQV = log_p_BQV + gumbel(rows.seed_B.unsqueeze(1), index_BQ, log_p_BQV.shape[2])
        is_sampled_B11 = rows.temperature_B.view(-1, 1, 1) > 0
        adjusted_BQV = torch.where(is_sampled_B11, log_p_BQV, adjusted_BQV)
    return top_by_logits(
        adjusted_BQV=adjusted_BQV,
        rows=rows,
        num_output_B=num_output_B,
        nodes=nodes,
        num_candidates=num_candidates,
    )


def draw_without_replacement(
    adjusted_BQV: Tensor, rows: SamplingRows, num_output_B: Tensor, nodes: Tree, num_candidates: int
) -> TopCandidates:
    """Sample candidates without replacement from q, the filtered distribution.

    The samples are the tokens with the largest log probability plus Gumbel noise (Kool et al.,
    arXiv 1903.06059).

    The score of a candidate is the probability mass that the candidates before it leave, so it does
    not depend on the candidate's own token. If it did, the tokens in the tree of the best scores
    would not be distributed like q. Acceptance by p/q would then not yield p.

    The noise is independent between the nodes of a step, and between steps, because its key has the
    index of the step's first output token.
    """
    greedy = top_by_logits(
        adjusted_BQV=adjusted_BQV,
        rows=rows,
        num_output_B=num_output_B,
        nodes=nodes,
        num_candidates=num_candidates,
    )
    if rows.all_greedy:
        return greedy
    log_q_BQV = rows.sampler.filtered_log_probs(adjusted_BQV, rows)
    place_Q = torch.arange(1, adjusted_BQV.shape[1] + 1, device=adjusted_BQV.device)
    number_BQ = (nodes.depth_BQ << 6) + place_Q
    seed_BQ = rows.seed_B.unsqueeze(1) ^ (number_BQ << _NODE_SHIFT)
    noise_BQV = gumbel(
        seed=seed_BQ,
        output_index=num_output_B.unsqueeze(1),
        vocab_size=log_q_BQV.shape[2],
        stream=DRAFT,
    )
    tokens_BQK = (log_q_BQV + noise_BQV).topk(num_candidates).indices
    log_probs_BQK = log_q_BQV.gather(2, tokens_BQK).nan_to_num(nan=LOG_ZERO, neginf=LOG_ZERO)
    taken_BQK = log_probs_BQK.double().exp()
    left_BQK = (1 - (taken_BQK.cumsum(2) - taken_BQK)).clamp(0, 1).log().float()
    is_sampled_B = rows.temperature_B > 0
    found = TopCandidates(
        tokens_BQK=tokens_BQK,
        log_probs_BQK=log_probs_BQK,
        scores_BQK=left_BQK,
        q_BQV=log_q_BQV.exp(),
        drawn_B=is_sampled_B,
    )
    return found.where(is_sampled_B, greedy)
