"""Verification results for rules that test each draft on its own: the deepest accepted path.

Shape legend: B rows, N drafts of this step, Q = N + 1 nodes, E positions of the deepest path, V
vocabulary.
"""

import torch
from torch import Tensor

from tandem.model.network.tree import on_path
from tandem.model.sampling.acceptance.base import VerifyInput, VerifyResult


def is_target(verify_input: VerifyInput) -> Tensor:
    """Return whether each draft [B, N] is the token that the main model chose at the node before
    it."""
    if verify_input.tree is None:
        return verify_input.drafts_BN == verify_input.targets_BN1[:, :-1]
    return verify_input.drafts_BN == verify_input.targets_BN1.gather(
        1, verify_input.tree.parent_BQ[:, 1:]
    )


def before_drafts(verify_input: VerifyInput) -> Tensor:
    """Return the adjusted logits [B, N, V] at the node before each draft."""
    if verify_input.tree is None:
        return verify_input.adjusted_BN1V[:, :-1]
    parents_BN1 = verify_input.tree.parent_BQ[:, 1:].unsqueeze(2)
    vocab_size = verify_input.adjusted_BN1V.shape[2]
    return verify_input.adjusted_BN1V.gather(1, parents_BN1.expand(-1, -1, vocab_size))


def emit_accepted(verify_input: VerifyInput, passes_BN: Tensor, score_BN: Tensor) -> VerifyResult:
    """Emit the accepted drafts unchanged, then one token of the main model (``targets_BN1``): in
    place of the first rejected draft, or after the last draft. ``score_BN`` breaks ties between the
    paths of a tree."""
    drafts_BN = verify_input.drafts_BN
    targets_BN1 = verify_input.targets_BN1
    if verify_input.tree is not None:
        return deepest_path(verify_input, passes_BN, score_BN)
    num_accepted_B = passes_BN.long().cumprod(1).sum(1).minimum(verify_input.acceptance.limit_B)
    place_N = torch.arange(drafts_BN.shape[1], device=drafts_BN.device)
    is_draft_BN = place_N < num_accepted_B.unsqueeze(1)
    emitted_BN = torch.where(is_draft_BN, drafts_BN, targets_BN1[:, :-1])
    return VerifyResult(torch.cat((emitted_BN, targets_BN1[:, -1:]), 1), num_accepted_B)


def deepest_path(
    verify_input: VerifyInput, passes_BN: Tensor, score_BN: Tensor | None = None
) -> VerifyResult:
    """Emit the drafts of the deepest accepted path unchanged, then the main model's token at its
    end.

    Ties go to the greatest sum of scores, then to the earliest node.
    """
    end_B1, depth_B1 = _deepest_end(verify_input, passes_BN, score_BN)
    last_B1 = verify_input.targets_BN1.gather(1, end_B1)
    return path_result(
        verify_input=verify_input,
        end_B=end_B1.squeeze(1),
        depth_B=depth_B1.squeeze(1),
        last_B=last_B1.squeeze(1),
    )


def path_result(
    verify_input: VerifyInput, end_B: Tensor, depth_B: Tensor, last_B: Tensor
) -> VerifyResult:
    """Return the result that accepts the path to node ``end_B``, ``depth_B`` deep, and then emits
    ``last_B``."""
    tree = verify_input.tree
    drafts_BN = verify_input.drafts_BN
    assert tree is not None, "path_result needs a tree, got a chain"
    node_Q = torch.arange(drafts_BN.shape[1] + 1, device=drafts_BN.device)
    is_on_BQ = (tree.bits_BQ.gather(1, end_B.unsqueeze(1)) >> node_Q) & 1 == 1
    at_BQ = tree.depth_BQ.where(is_on_BQ, tree.depth + 1)
    path_BE = torch.zeros_like(end_B.unsqueeze(1)).repeat(1, tree.depth + 2)
    path_BE = path_BE.scatter(1, at_BQ, node_Q.expand_as(at_BQ))[:, :-1]
    next_BE = drafts_BN.gather(1, (path_BE[:, 1:] - 1).clamp(min=0))
    emitted_BE = torch.cat((next_BE, next_BE[:, -1:]), 1)
    emitted_BE = emitted_BE.scatter(1, depth_B.unsqueeze(1), last_B.unsqueeze(1))
    return VerifyResult(emitted_BE, depth_B, path_BE)


def _deepest_end(
    verify_input: VerifyInput, passes_BN: Tensor, score_BN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the last node of the deepest accepted path and its depth, [B, 1] each."""
    tree = verify_input.tree
    num_nodes = passes_BN.shape[1]
    assert tree is not None
    node_N = torch.arange(1, num_nodes + 1, device=passes_BN.device)
    limit_B1 = verify_input.acceptance.limit_B.clamp(max=tree.depth).unsqueeze(1)
    passes_BN = passes_BN & (tree.depth_BQ[:, 1:] <= limit_B1)
    if verify_input.num_B is not None:
        passes_BN = passes_BN & (node_N <= verify_input.num_B.unsqueeze(1))
    open_B1 = (passes_BN.long() << node_N).sum(1, keepdim=True) + 1
    depth_BQ = tree.depth_BQ.where(tree.bits_BQ & ~open_B1 == 0, -1)
    depth_B1 = depth_BQ.amax(1, keepdim=True)
    best_BQ = (depth_BQ == depth_B1).float()
    if score_BN is not None:
        score_B1N = score_BN.unsqueeze(1)
        total_BQ = score_B1N.where(on_path(tree.bits_BQ, num_nodes), 0.0).sum(2)
        best_BQ = total_BQ.where(best_BQ > 0, float("-inf"))
    return best_BQ.argmax(1, keepdim=True), depth_B1
