"""Thinking phase at each position of a step: whether the position is in the thinking part of the
output (text/think.py).

Shape legend: B rows, N drafts, Q = N + 1 nodes, M tokens that a step can emit at most.
"""

import torch
from torch import Tensor

from tandem.model.network.tree import Tree, on_path
from tandem.text.think import ThinkIds

_NO_TOKEN = -1


def thinking_before(
    thinking_B: Tensor, drafts_BN: Tensor, think_ids: ThinkIds | None, tree: Tree | None = None
) -> Tensor:
    """Return whether the position of each draft is in the thinking part: bool [B, N].
    ``thinking_B`` is the value for the first draft."""
    if think_ids is None or drafts_BN.shape[1] == 0:
        return thinking_B.unsqueeze(1).expand(drafts_BN.shape)
    if tree is not None:
        return _tree_phases(
            thinking_B=thinking_B, drafts_BN=drafts_BN, think_ids=think_ids, tree=tree
        )
    return torch.stack(_phases(thinking_B, drafts_BN[:, :-1], think_ids), 1)


def phase_after(
    thinking_B: Tensor, tokens_BM: Tensor, num_emitted_B: Tensor, think_ids: ThinkIds | None
) -> Tensor:
    """Return whether the position after the first ``num_emitted_B`` of ``tokens_BM`` is in the
    thinking part: bool [B]."""
    if think_ids is None:
        return thinking_B
    place_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
    emitted_BM = tokens_BM.masked_fill(place_M >= num_emitted_B.unsqueeze(1), _NO_TOKEN)
    return _phases(thinking_B, emitted_BM, think_ids)[-1]


def _tree_phases(thinking_B: Tensor, drafts_BN: Tensor, think_ids: ThinkIds, tree: Tree) -> Tensor:
    """Return whether the position after each draft's parent is in the thinking part: bool [B, N].

    The last token on the path that starts or ends the thinking part decides, or ``thinking_B`` if
    there is none. Later nodes of a path have higher numbers.
    """
    begin_id, end = think_ids
    bits_BN = tree.bits_BQ.gather(1, tree.parent_BQ[:, 1:])
    is_on_BNN = on_path(bits_BN, drafts_BN.shape[1])
    node_N = torch.arange(1, drafts_BN.shape[1] + 1, device=drafts_BN.device)
    last_begin_BN, last_end_BN = (
        node_N.where(is_on_BNN & (drafts_BN == token).unsqueeze(1), 0).amax(2)
        for token in (begin_id, end)
    )
    starts_BN = (last_begin_BN > 0) | thinking_B.unsqueeze(1)
    return starts_BN & (last_begin_BN >= last_end_BN)


def _phases(thinking_B: Tensor, tokens_BM: Tensor, think_ids: ThinkIds) -> list[Tensor]:
    """Return whether the positions before the first token and after each of the M tokens are in the
    thinking part: M + 1 masks [B]."""
    begin_id, end = think_ids
    begins_BM = tokens_BM == begin_id
    stays_BM = tokens_BM != end
    phases = [thinking_B]
    for begins_B, stays_B in zip(begins_BM.unbind(1), stays_BM.unbind(1), strict=True):
        phases.append((phases[-1] | begins_B) & stays_B)
    return phases
