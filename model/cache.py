"""The paged latent caches of one rank: one tensor per layer, grouped by who reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAIN, MTP = "main", "mtp"

Caches = dict[str, list[Tensor]]
"""Group name -> one tensor [num_pages, page_size, latent_dim] per layer."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a life: ``width`` values per token and layer."""

    name: str
    num_layers: int
    width: int


def allocate_caches(
    groups: tuple[CacheGroup, ...],
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Caches:
    """Zeroed caches: whatever is read before it was written, the dummy page too, is finite."""
    shape = (num_pages, page_size)
    return {
        group.name: [
            torch.zeros(*shape, group.width, dtype=dtype, device=device)
            for _ in range(group.num_layers)
        ]
        for group in groups
    }
