"""The paged latent caches of one rank: one tensor per layer, grouped by who reads them."""

import math
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

MAIN, MTP = "main", "mtp"

Caches = dict[str, list[Tensor]]
"""Group name -> one tensor [num_pages, page_size, latent_dim] per layer."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a life: ``width`` values per token and layer, which depend on ``lag`` later
    tokens."""

    name: str
    num_layers: int
    width: int
    lag: int = 0


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU the system gives each memory page out only when it is first written, and
    small ones: to clear a huge one for every layer stalls a step for tens of milliseconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
