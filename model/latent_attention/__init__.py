"""Attention of decode rows over the paged latent cache: one file per way to compute it.

Every way is a function ``(q_BQHL, cache, batch, num_values, scale) -> o_BQHC`` of absorbed
queries and the pages [num_pages, page_size, L] of one layer; values are the first
``num_values`` (C) of each entry (spec §3, absorbed form).
"""

from collections.abc import Callable

from torch import Tensor

from model.batch import Batch
from model.latent_attention import by_row, gathered

LatentAttention = Callable[[Tensor, Tensor, Batch, int, float], Tensor]
WAYS: dict[str, LatentAttention] = {"by_row": by_row.attend, "gathered": gathered.attend}


def latent_attention(device_type: str) -> LatentAttention:
    """The best way on a kind of device. On CPUs one row after the other keeps its pages in the
    processor's cache; elsewhere all rows are one launch."""
    return WAYS["by_row" if device_type == "cpu" else "gathered"]
