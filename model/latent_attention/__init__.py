"""Attention of decode rows over the paged latent cache: one file per way to compute it.

Every way is a function ``(q_BQHL, cache, batch, num_values, scale) -> o_BQHC`` of absorbed
queries and the pages [num_pages, page_size, L] of one layer; values are the first
``num_values`` (C) of each entry (spec §3, absorbed form).
"""

from collections.abc import Callable

from torch import Tensor

from model.batch import Batch

LatentAttention = Callable[[Tensor, Tensor, Batch, int, float], Tensor]


def _by_row() -> LatentAttention:
    from model.latent_attention.by_row import attend

    return attend


def _gathered() -> LatentAttention:
    from model.latent_attention.gathered import attend

    return attend


WAYS: dict[str, Callable[[], LatentAttention]] = {"by_row": _by_row, "gathered": _gathered}


def latent_attention(device_type: str) -> LatentAttention:
    """The best way on a kind of device. On CPUs one row after the other keeps its pages in the
    processor's cache; elsewhere all rows are one launch."""
    return WAYS["by_row" if device_type == "cpu" else "gathered"]()
