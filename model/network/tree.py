"""Trees of drafts as tensors: who lies behind whom, how deep.

Shape legend: B rows (or 1, if all have the same tree), N drafts, Q = N + 1 nodes: node 0 is the
last known token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape


class Tree(NamedTuple):
    """``parent_BQ`` and ``depth_BQ`` are each node's (node 0 is its own parent); bit n of
    ``bits_BQ`` says that node n is the node itself or lies on its path. No node lies deeper than
    ``depth``."""

    parent_BQ: Tensor
    depth_BQ: Tensor
    bits_BQ: Tensor
    depth: int

    def expand(self, num_rows: int) -> "Tree":
        parent_BQ, depth_BQ, bits_BQ = (one.expand(num_rows, -1) for one in self[:3])
        return Tree(parent_BQ, depth_BQ, bits_BQ, self.depth)


def build_tree(parents_BN: Tensor, depth: int) -> Tree:
    """By each draft's parent, which is an earlier node. Paths are followed in steps that double; of
    nodes deeper than ``depth``, which nobody may accept, that is known alone."""
    parent_BQ = torch.cat((torch.zeros_like(parents_BN[:, :1]), parents_BN), 1)
    node_Q = torch.arange(parent_BQ.shape[1], device=parent_BQ.device)
    bits_BQ = (torch.ones_like(node_Q) << node_Q).expand_as(parent_BQ)
    depth_BQ, above_BQ = (node_Q > 0).long().expand_as(parent_BQ), parent_BQ
    for _ in range(depth.bit_length()):
        bits_BQ = bits_BQ | bits_BQ.gather(1, above_BQ)
        depth_BQ = depth_BQ + depth_BQ.gather(1, above_BQ)
        above_BQ = above_BQ.gather(1, above_BQ)
    return Tree(parent_BQ, depth_BQ, bits_BQ, depth)


def static_tree(level: DraftShape, device: torch.device) -> Tree | None:
    """Of a level that has one which is no chain, for one row."""
    if level.is_chain or level.parents is None:
        return None
    return build_tree(torch.tensor([level.parents], device=device), level.depth)


def on_path(bits_BX: Tensor, num_nodes: int) -> Tensor:
    """Whether each of drafts 1 .. is among ``bits``: bool [B, X, N]."""
    node_N = torch.arange(1, num_nodes + 1, device=bits_BX.device)
    return (bits_BX.unsqueeze(-1) >> node_N) & 1 == 1
