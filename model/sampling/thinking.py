"""Whether each place of a step is inside the thinking part of its answer (text/think.py).

Shape legend: B rows, N drafts, M tokens a step can emit at most.
"""

import torch
from torch import Tensor

from text.think import ThinkIds

_NO_TOKEN = -1


def thinking_before(thinking_B: Tensor, drafts_BN: Tensor, think_ids: ThinkIds | None) -> Tensor:
    """The phase [B, N] of each draft's place; ``thinking_B`` is that of the first."""
    if think_ids is None or drafts_BN.shape[1] == 0:
        return thinking_B.unsqueeze(1).expand(drafts_BN.shape)
    return torch.stack(_phases(thinking_B, drafts_BN[:, :-1], think_ids), 1)


def phase_after(
    thinking_B: Tensor, tokens_BM: Tensor, num_emitted_B: Tensor, think_ids: ThinkIds | None
) -> Tensor:
    """The phase [B] after the first ``num_emitted_B`` of ``tokens_BM``."""
    if think_ids is None:
        return thinking_B
    place_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
    emitted_BM = tokens_BM.masked_fill(place_M >= num_emitted_B.unsqueeze(1), _NO_TOKEN)
    return _phases(thinking_B, emitted_BM, think_ids)[-1]


def _phases(thinking_B: Tensor, tokens_BM: Tensor, think_ids: ThinkIds) -> list[Tensor]:
    """Before the tokens, and after each of them."""
    begin, end = think_ids
    begins_BM, stays_BM = tokens_BM == begin, tokens_BM != end
    phases = [thinking_B]
    for begins_B, stays_B in zip(begins_BM.unbind(1), stays_BM.unbind(1), strict=True):
        phases.append((phases[-1] | begins_B) & stays_B)
    return phases
