"""The paged latent caches of one rank: one tensor per layer, grouped by who reads them."""

from dataclasses import dataclass

import numpy as np
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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU the system gives each memory page out only when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)
