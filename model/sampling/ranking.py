"""What a drafter's distributions put into a tree: the likeliest tokens, or some drawn from them.

Shape legend: B rows, Q nodes of each, K ranks, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.model.network.tree import Tree
from tandem.model.sampling.sampler import DRAFT, SamplingRows, gumbel

LOG_ZERO = float("-inf")
_NODE_SHIFT = 32


class TopCandidates(NamedTuple):
    """The tokens [B, Q, K] that may follow each node, in their order, the logarithm of the share
    that each has, and that of what its place in a tree is worth. ``q_BQV`` are the probabilities
    that those of the rows ``drawn_B`` were drawn from, each time without those before; None if no
    row's are drawn."""

    tokens_BQK: Tensor
    log_probs_BQK: Tensor
    scores_BQK: Tensor
    q_BQV: Tensor | None = None
    drawn_B: Tensor | None = None

    def where(self, rows_B: Tensor, other: "TopCandidates") -> "TopCandidates":
        """This where ``rows_B`` is True, ``other`` elsewhere; one of them at most has drawn."""
        own_B, own = (rows_B, self) if self.drawn_B is not None else (~rows_B, other)
        drawn_B = None if own.drawn_B is None else own.drawn_B & own_B
        tokens, shares, worth = (
            torch.where(rows_B.view(-1, 1, 1), one, two)
            for one, two in zip(self[:3], other[:3], strict=True)
        )
        return TopCandidates(tokens, shares, worth, own.q_BQV, drawn_B)


def top_by_logits(
    adjusted_BQV: Tensor, rows: SamplingRows, num_output_B: Tensor, nodes: Tree, num_candidates: int
) -> TopCandidates:
    """By logits alone."""
    shares, tokens = adjusted_BQV.log_softmax(-1).topk(num_candidates)
    shares = shares.nan_to_num(nan=LOG_ZERO, neginf=LOG_ZERO).clamp(max=0)
    return TopCandidates(tokens, shares, shares)


def top_by_target_noise(
    adjusted_BQV: Tensor, rows: SamplingRows, num_output_B: Tensor, nodes: Tree, num_candidates: int
) -> TopCandidates:
    """Likely is to a sampled row what it would choose of these logits with its noise of that place:
    the first is the draft of a chain, each other that if those before were ruled out."""
    if not rows.all_greedy:
        index_BQ = num_output_B.unsqueeze(1) + nodes.depth_BQ
        log_p_BQV = rows.sampler.filtered_log_probs(adjusted_BQV, rows)
        log_p_BQV = log_p_BQV + gumbel(rows.seed_B.unsqueeze(1), index_BQ, log_p_BQV.shape[2])
        is_sampled_B11 = rows.temperature_B.view(-1, 1, 1) > 0
        adjusted_BQV = torch.where(is_sampled_B11, log_p_BQV, adjusted_BQV)
    return top_by_logits(adjusted_BQV, rows, num_output_B, nodes, num_candidates)


def draw_without_replacement(
    adjusted_BQV: Tensor, rows: SamplingRows, num_output_B: Tensor, nodes: Tree, num_candidates: int
) -> TopCandidates:
    """Drawn from q, the filtered distribution, without replacement, as the largest of perturbed
    logarithms are (Kool et al., arXiv 1903.06059).

    A place is worth what is known before its token is drawn: the share of the node, less those of
    the tokens drawn before. Were it what the token tells, a tree of the best places would have
    tokens that are no draws of q, and acceptance by p/q would not give p (spec §9). No node's noise
    is another's, nor that of another step: the index is that of the step's first token.
    """
    greedy = top_by_logits(adjusted_BQV, rows, num_output_B, nodes, num_candidates)
    if rows.all_greedy:
        return greedy
    log_q_BQV = rows.sampler.filtered_log_probs(adjusted_BQV, rows)
    place_Q = torch.arange(1, adjusted_BQV.shape[1] + 1, device=adjusted_BQV.device)
    number_BQ = (nodes.depth_BQ << 6) + place_Q
    seed_BQ = rows.seed_B.unsqueeze(1) ^ (number_BQ << _NODE_SHIFT)
    noise_BQV = gumbel(seed_BQ, num_output_B.unsqueeze(1), log_q_BQV.shape[2], DRAFT)
    tokens_BQK = (log_q_BQV + noise_BQV).topk(num_candidates).indices
    log_probs_BQK = log_q_BQV.gather(2, tokens_BQK).nan_to_num(nan=LOG_ZERO, neginf=LOG_ZERO)
    taken_BQK = log_probs_BQK.double().exp()
    left_BQK = (1 - (taken_BQK.cumsum(2) - taken_BQK)).clamp(0, 1).log().float()
    is_sampled_B = rows.temperature_B > 0
    found = TopCandidates(tokens_BQK, log_probs_BQK, left_BQK, log_q_BQV.exp(), is_sampled_B)
    return found.where(is_sampled_B, greedy)
