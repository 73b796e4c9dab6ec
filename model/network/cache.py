"""The paged latent caches of one rank: one tensor per layer, grouped by the model they serve."""

import math
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

MAIN = "main"
MTP = "mtp"

Caches = dict[str, list[Tensor]]
"""One tensor [num_pages, page_size, width] per layer, by the name of the cache group."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Cache layers of one model: the main model's or a drafter's.

    Attributes:
        name: Key of the group in ``Caches``.
        num_layers: Number of layers.
        width: Number of values per token and layer.
        lag: Number of later tokens that an entry depends on.
    """

    name: str
    num_layers: int
    width: int
    lag: int = 0


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a zeroed tensor. On CPU, the system commits each memory page at the first write.

    Huge pages are disabled on CPU: clearing one per layer stalls a step for tens of milliseconds.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
