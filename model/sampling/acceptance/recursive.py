"""Recursive rejection sampling: p/q acceptance where a node has several children (SpecInfer, arXiv
2305.09781; without replacement, arXiv 2402.14160).

At each node, r starts as p. The children are tried in order. Child x is accepted with probability
min(1, r(x) / q(x)), where q excludes the children before x. After a rejection, r becomes max(r - q,
0), normalised. If no child is accepted, the next token is sampled from r.
Shape legend: B rows, N drafts, Q = N + 1 nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.model.sampling.acceptance.base import VerifyInput, VerifyResult
from tandem.model.sampling.acceptance.paths import path_result
from tandem.model.sampling.sampler import COIN, RESIDUAL, sample, uniform


@dataclass(slots=True)
class _Walk:
    """Progress of each row's walk down the tree.

    Attributes:
        end_B: Node that the walk has reached.
        residual_BV: Distribution r of the next token at that node.
        tried_BV: Tokens of that node's children that were rejected.
    """

    end_B: Tensor
    residual_BV: Tensor
    tried_BV: Tensor


def accept_drafts(verify_input: VerifyInput) -> VerifyResult:
    """Accept one path of drafts and sample the token after it."""
    tree = verify_input.tree
    rows = verify_input.sampling
    assert tree is not None, "recursive rejection needs a tree, got a chain"
    p_BQV = rows.sampler.filtered_log_probs(verify_input.adjusted_BN1V, rows).exp()
    end_B = torch.zeros_like(verify_input.num_output_B)
    walk = _Walk(end_B, p_BQV[:, 0], torch.zeros_like(p_BQV[:, 0], dtype=torch.bool))
    for node in range(1, p_BQV.shape[1]):
        _try_node(walk=walk, verify_input=verify_input, node=node, p_BV=p_BQV[:, node])
    depth_B = tree.depth_BQ.gather(1, walk.end_B.unsqueeze(1)).squeeze(1)
    index_B = verify_input.num_output_B + depth_B
    last_B = sample(
        log_p=walk.residual_BV.log(), seed=rows.seed_B, output_index=index_B, stream=RESIDUAL
    )
    return path_result(verify_input=verify_input, end_B=walk.end_B, depth_B=depth_B, last_B=last_B)


def _try_node(walk: _Walk, verify_input: VerifyInput, node: int, p_BV: Tensor) -> None:
    """Try ``node`` in every row whose walk has reached the node's parent.

    The node is accepted if u * q <= r for a uniform random number u. Computes in float64: if the
    product underflowed to 0, tokens of probability 0 would be accepted.
    """
    tree = verify_input.tree
    rows = verify_input.sampling
    assert tree is not None
    token_B1 = verify_input.drafts_BN[:, node - 1 : node]
    depth_B = tree.depth_BQ[:, node]
    is_tried_B = tree.parent_BQ[:, node] == walk.end_B
    is_tried_B = is_tried_B & (depth_B <= verify_input.acceptance.limit_B.clamp(max=tree.depth))
    if verify_input.num_B is not None:
        is_tried_B = is_tried_B & (node <= verify_input.num_B)
    q_BV = _drawn_from(verify_input, node, token_B1).masked_fill(walk.tried_BV, 0).double()
    total_B1 = q_BV.sum(1, keepdim=True)
    q_BV = q_BV / total_B1.where(total_B1 > 0, 1)
    q_B, r_B = (x.gather(1, token_B1).squeeze(1) for x in (q_BV, walk.residual_BV.double()))
    is_tried_B = is_tried_B & (q_B > 0)
    index_B = verify_input.num_output_B + depth_B
    u_B = uniform(rows.seed_B ^ (node << 32), index_B, COIN)
    passes_B = is_tried_B & (u_B * q_B <= r_B)
    fails_B1 = (is_tried_B & ~passes_B).unsqueeze(1)
    left_BV = (walk.residual_BV - q_BV).clamp(min=0)
    left_B1 = left_BV.sum(1, keepdim=True)
    left_BV = torch.where(left_B1 > 0, left_BV / left_B1, walk.residual_BV.double()).float()
    at_BV = torch.zeros_like(walk.tried_BV).scatter(1, token_B1, True)
    passes_B1 = passes_B.unsqueeze(1)
    walk.residual_BV = torch.where(
        passes_B1, p_BV, torch.where(fails_B1, left_BV, walk.residual_BV)
    )
    walk.tried_BV = ~passes_B1 & (walk.tried_BV | (fails_B1 & at_BV))
    walk.end_B = torch.where(passes_B, node, walk.end_B)


def _drawn_from(verify_input: VerifyInput, node: int, token_B1: Tensor) -> Tensor:
    """Return the distribution q [B, V] of the children of the node's parent; one-hot for
    deterministic drafts."""
    if verify_input.q_BNV is not None:
        return verify_input.q_BNV[:, node - 1]
    p_BV = verify_input.adjusted_BN1V[:, 0]
    return torch.zeros_like(p_BV).scatter(1, token_B1, 1.0)
