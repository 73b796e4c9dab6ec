"""Copies cache entries of accepted drafts to their final slots, in all layers with one launch.

Shape legend: B rows, N moves of each, L layers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


class CachePointers:
    """Device tensor with the addresses of caches.

    It is created once, because a captured graph cannot copy the addresses from the host.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._addresses = [cache.data_ptr() for cache in caches]
        self._addresses_L = torch.tensor(self._addresses, device=caches[0].device)

    def matches(self, caches: Sequence[Tensor]) -> bool:
        """Return whether these are the caches whose addresses are stored."""
        return [cache.data_ptr() for cache in caches] == self._addresses

    def copy_slots(self, caches: Sequence[Tensor], from_BN: Tensor, to_BN: Tensor) -> None:
        (num_rows, num_moves), width = from_BN.shape, caches[0].shape[-1]
        _move[(num_rows, len(caches))](
            *(self._addresses_L, caches[0], from_BN.contiguous(), to_BN.contiguous()),
            NUM=num_moves,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
        )


@triton.jit
def _move(
    addresses_L, like, from_BN, to_BN, NUM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    cache = tl.load(addresses_L + tl.program_id(1)).to(like.dtype)
    i = tl.arange(0, BLOCK)
    for move in range(NUM):
        at = tl.load(from_BN + row * NUM + move) * WIDTH + i
        to = tl.load(to_BN + row * NUM + move) * WIDTH + i
        tl.store(cache + to, tl.load(cache + at, mask=i < WIDTH), mask=i < WIDTH)
