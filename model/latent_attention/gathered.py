"""All rows at once over a copy of their pages; shapes depend on the page table's width alone.

Shape legend: B sequences, Q query rows, H heads, L = C + R cached width, S context slots.
"""

import torch
from torch import Tensor

from model.batch import Batch, gather_pages, visible_slots


def attend(q_BQHL: Tensor, cache: Tensor, batch: Batch, num_values: int, scale: float) -> Tensor:
    """Attention output in latent space [B, Q, H, C]."""
    context_BSL = gather_pages(cache, batch.page_table_BP)
    num_rows, num_heads = q_BQHL.shape[1:3]
    scores = torch.bmm(q_BQHL.flatten(1, 2), context_BSL.transpose(1, 2)).float()
    hidden_BQS = ~visible_slots(batch, context_BSL.shape[1])
    scores_BQHS = scores.unflatten(1, (num_rows, num_heads)) * scale
    scores_BQHS = scores_BQHS.masked_fill(hidden_BQS.unsqueeze(2), float("-inf"))
    p = scores_BQHS.softmax(-1).to(context_BSL.dtype).flatten(1, 2)
    return torch.bmm(p, context_BSL[..., :num_values]).unflatten(1, (num_rows, num_heads))
