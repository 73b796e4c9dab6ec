"""Draft trees as tensors: parent, depth and ancestors of each node.

Shape legend: B rows (or 1, if all have the same tree), N drafts, Q = N + 1 nodes: node 0 is the
last known token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.draft_shapes import DraftShape


class Tree(NamedTuple):
    """Draft tree of each row.

    Attributes:
        parent_BQ: Parent of each node; node 0 is its own parent.
        depth_BQ: Depth of each node; 0 for node 0.
        bits_BQ: Ancestor masks: bit n is set if node n is the node itself or an ancestor of it.
        depth: Maximum depth.
    """

    parent_BQ: Tensor
    depth_BQ: Tensor
    bits_BQ: Tensor
    depth: int

    def expand(self, num_rows: int) -> "Tree":
        parent_BQ, depth_BQ, bits_BQ = (tensor.expand(num_rows, -1) for tensor in self[:3])
        return Tree(parent_BQ=parent_BQ, depth_BQ=depth_BQ, bits_BQ=bits_BQ, depth=self.depth)


def build_tree(parents_BN: Tensor, depth: int) -> Tree:
    """Build the trees in which draft i has the parent ``parents_BN[:, i - 1]``, an earlier node.

    Paths to the root are followed by pointer doubling. Nodes deeper than ``depth`` are never
    accepted. Their depth and ancestors may be wrong, but the depth still exceeds ``depth``.
    """
    parent_BQ = torch.cat((torch.zeros_like(parents_BN[:, :1]), parents_BN), 1)
    node_Q = torch.arange(parent_BQ.shape[1], device=parent_BQ.device)
    bits_BQ = (torch.ones_like(node_Q) << node_Q).expand_as(parent_BQ)
    depth_BQ = (node_Q > 0).long().expand_as(parent_BQ)
    above_BQ = parent_BQ
    for _ in range(depth.bit_length()):
        bits_BQ = bits_BQ | bits_BQ.gather(1, above_BQ)
        depth_BQ = depth_BQ + depth_BQ.gather(1, above_BQ)
        above_BQ = above_BQ.gather(1, above_BQ)
    return Tree(parent_BQ=parent_BQ, depth_BQ=depth_BQ, bits_BQ=bits_BQ, depth=depth)


def static_tree(draft_shape: DraftShape, device: torch.device) -> Tree | None:
    """Return the tree of a draft shape for one row, None for a chain or a per-step tree."""
    if draft_shape.is_chain or draft_shape.parents is None:
        return None
    return build_tree(torch.tensor([draft_shape.parents], device=device), draft_shape.depth)


def on_path(bits_BX: Tensor, num_nodes: int) -> Tensor:
    """Return whether the bit of each draft 1 .. N is set in ``bits_BX``: bool [B, X, N]."""
    node_N = torch.arange(1, num_nodes + 1, device=bits_BX.device)
    return (bits_BX.unsqueeze(-1) >> node_N) & 1 == 1
