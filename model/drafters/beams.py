"""A beam over any drafter's predictions: pure functions.

Candidates are numbered in the order in which they were found, from 1; 0 is the last known token.
Shape legend: B rows, K nodes of the beam, M nodes of all beams so far, R ranks, C = K * R
candidates, N drafts, D hidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.drafters.base import Drafts
from model.network.tree import Tree


class Candidates(NamedTuple):
    """Tokens [B, C], the number of the candidate that each comes after, and the logarithm of the
    share that its path has of all."""

    tokens_BC: Tensor
    parents_BC: Tensor
    scores_BC: Tensor


class Beam(NamedTuple):
    """The nodes that are drafted on from. ``nodes`` are their places in the tree whose drafts are
    ``drafts_BM``, these themselves last."""

    numbers_BK: Tensor
    scores_BK: Tensor
    hidden_BKD: Tensor
    drafts_BM: Tensor
    nodes: Tree


def root(hidden_BD: Tensor) -> Beam:
    """The last known token alone."""
    zeros_B1 = hidden_BD.new_zeros(len(hidden_BD), 1)
    none_B1 = zeros_B1.long()
    nodes = Tree(none_B1, none_B1, none_B1 + 1, 0)
    return Beam(none_B1, zeros_B1.float(), hidden_BD.unsqueeze(1), none_B1[:, :0], nodes)


def followed(beam: Beam, tokens_BKR: Tensor, scores_BKR: Tensor) -> Candidates:
    """What may come after the beam, by the logarithm of the share of each token."""
    parents_BKR = beam.numbers_BK.unsqueeze(2).expand_as(tokens_BKR)
    scores_BKR = beam.scores_BK.unsqueeze(2) + scores_BKR
    return Candidates(tokens_BKR.flatten(1), parents_BKR.flatten(1), scores_BKR.flatten(1))


def narrowed(beam: Beam, found: Sequence[Candidates]) -> Beam:
    """The best of those found last, with the hidden states of what they come after."""
    last, num_ranks = found[-1], found[-1].tokens_BC.shape[1] // beam.numbers_BK.shape[1]
    best_BK = last.scores_BC.argsort(dim=1, descending=True, stable=True)[:, :num_ranks]
    from_BK, num_before = best_BK // num_ranks, beam.drafts_BM.shape[1]
    node_K = torch.arange(num_before + 1, num_before + num_ranks + 1, device=best_BK.device)
    hidden_size = beam.hidden_BKD.shape[2]
    depth = beam.nodes.depth + 1
    own_bit_K = torch.ones_like(node_K) << node_K
    return Beam(
        numbers_BK=best_BK + 1 + sum(one.tokens_BC.shape[1] for one in found[:-1]),
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


def chosen(found: Sequence[Candidates], num_nodes: int) -> Drafts:
    """The best of all, as a tree: no candidate scores more than what it comes after, which was
    found before it."""
    tokens_BC, parents_BC, scores_BC = (torch.cat(x, 1) for x in zip(*found, strict=True))
    order_BC = scores_BC.argsort(dim=1, descending=True, stable=True)
    rank_BC = order_BC.argsort(1)
    best_BN = order_BC[:, :num_nodes]
    node_BC = torch.cat((torch.zeros_like(rank_BC[:, :1]), rank_BC + 1), 1)
    parents_BN = node_BC.gather(1, parents_BC.gather(1, best_BN))
    return Drafts(tokens_BC.gather(1, best_BN), parents_BN=parents_BN)
