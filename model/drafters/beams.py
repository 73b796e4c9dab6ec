"""Beam search over the predictions of any drafter, as pure functions.

Candidates are numbered from 1 in the order in which they were found; 0 is the last known token.
Shape legend: B rows, K nodes of the beam, M nodes of all beams so far, R tokens per node. C = K * R
candidates, N drafts, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.model.drafters.base import Drafts
from tandem.model.network.tree import Tree
from tandem.model.sampling.ranking import TopCandidates


class Candidates(NamedTuple):
    """Candidates for the draft tree: R tokens after each node of a beam.

    Attributes:
        tokens_BC: Candidate tokens.
        parents_BC: Candidate number of each candidate's parent.
        log_probs_BC: Log probability of the path that ends with each candidate.
        scores_BC: Score of each candidate's position (model/sampling/ranking.py), at most that of
            its parent.
        q_BKV: Distribution that the candidates after each node were sampled from. None if no
            candidate was sampled.
    """

    tokens_BC: Tensor
    parents_BC: Tensor
    log_probs_BC: Tensor
    scores_BC: Tensor
    q_BKV: Tensor | None


class Beam(NamedTuple):
    """Nodes that are expanded in the next pass.

    Attributes:
        numbers_BK: Candidate number of each node.
        log_probs_BK: Log probability of the path to each node.
        scores_BK: Score of each node.
        hidden_BKD: Hidden state that predicts the tokens after each node.
        drafts_BM: Tokens of all beams so far, those of this beam last.
        nodes: Position of each node in the tree of ``drafts_BM``.
    """

    numbers_BK: Tensor
    log_probs_BK: Tensor
    scores_BK: Tensor
    hidden_BKD: Tensor
    drafts_BM: Tensor
    nodes: Tree


def root_beam(hidden_BD: Tensor) -> Beam:
    """Return the beam that holds the last known token alone."""
    zeros_B1 = hidden_BD.new_zeros(len(hidden_BD), 1)
    none_B1 = zeros_B1.long()
    nodes = Tree(parent_BQ=none_B1, depth_BQ=none_B1, bits_BQ=none_B1 + 1, depth=0)
    whole_B1 = zeros_B1.float()  # log 1: the root is certain
    return Beam(
        numbers_BK=none_B1,
        log_probs_BK=whole_B1,
        scores_BK=whole_B1,
        hidden_BKD=hidden_BD.unsqueeze(1),
        drafts_BM=none_B1[:, :0],
        nodes=nodes,
    )


def expand_beam(beam: Beam, top: TopCandidates) -> Candidates:
    """Return the candidates after each node of the beam. No candidate scores higher than its
    parent."""
    parents_BKR = beam.numbers_BK.unsqueeze(2).expand_as(top.tokens_BQK)
    log_probs_BK1 = beam.log_probs_BK.unsqueeze(2)
    scores_BK1 = beam.scores_BK.unsqueeze(2)
    scores_BKR = (log_probs_BK1 + top.scores_BQK).minimum(scores_BK1)
    log_probs_BKR = log_probs_BK1 + top.log_probs_BQK
    own = top.tokens_BQK.flatten(1), parents_BKR.flatten(1)
    return Candidates(*own, log_probs_BKR.flatten(1), scores_BKR.flatten(1), top.q_BQV)


def next_beam(beam: Beam, candidates: Sequence[Candidates]) -> Beam:
    """Return the beam of the best candidates of the last expansion. ``hidden_BKD`` still holds the
    hidden states of their parents."""
    last = candidates[-1]
    num_candidates = candidates[-1].tokens_BC.shape[1] // beam.numbers_BK.shape[1]
    best_BK = last.scores_BC.argsort(dim=1, descending=True, stable=True)[:, :num_candidates]
    from_BK = best_BK // num_candidates
    num_before = beam.drafts_BM.shape[1]
    node_K = torch.arange(num_before + 1, num_before + num_candidates + 1, device=best_BK.device)
    hidden_size = beam.hidden_BKD.shape[2]
    depth = beam.nodes.depth + 1
    own_bit_K = torch.ones_like(node_K) << node_K
    return Beam(
        numbers_BK=best_BK + 1 + sum(level.tokens_BC.shape[1] for level in candidates[:-1]),
        log_probs_BK=last.log_probs_BC.gather(1, best_BK),
        scores_BK=last.scores_BC.gather(1, best_BK),
        hidden_BKD=beam.hidden_BKD.gather(1, from_BK.unsqueeze(2).expand(-1, -1, hidden_size)),
        drafts_BM=torch.cat((beam.drafts_BM, last.tokens_BC.gather(1, best_BK)), 1),
        nodes=Tree(
            from_BK,
            torch.full_like(best_BK, depth),
            beam.nodes.bits_BQ.gather(1, from_BK) | own_bit_K,
            depth,
        ),
    )


def select_tree(candidates: Sequence[Candidates], num_nodes: int) -> Drafts:
    """Return the ``num_nodes`` best candidates as a tree.

    Parents come before children, because no candidate scores higher than its parent, and equal
    scores keep the order in which they were found.
    """
    tokens_BC, parents_BC, scores_BC = (
        torch.cat([getattr(level, name) for level in candidates], 1)
        for name in ("tokens_BC", "parents_BC", "scores_BC")
    )
    order_BC = scores_BC.argsort(dim=1, descending=True, stable=True)
    rank_BC = order_BC.argsort(1)
    best_BN = order_BC[:, :num_nodes]
    node_BC = torch.cat((torch.zeros_like(rank_BC[:, :1]), rank_BC + 1), 1)
    parents_BN = node_BC.gather(1, parents_BC.gather(1, best_BN))
    return Drafts(
        tokens_BN=tokens_BC.gather(1, best_BN),
        num_B=None,
        q_BNV=_drawn_from(candidates, best_BN),
        parents_BN=parents_BN,
    )


def _drawn_from(candidates: Sequence[Candidates], best_BN: Tensor) -> Tensor | None:
    """Return the distribution [B, N, V] that each draft was sampled from, None if none was."""
    many = [level.q_BKV for level in candidates if level.q_BKV is not None]
    if not many:
        return None
    num_candidates = candidates[0].tokens_BC.shape[1]
    q_BMV = torch.cat(many, 1)
    at_BN1 = (best_BN // num_candidates).unsqueeze(2)
    return q_BMV.gather(1, at_BN1.expand(-1, -1, q_BMV.shape[2]))
