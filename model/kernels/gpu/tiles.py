"""Tile sizes and pipeline depths of products, tuned by measurement.

Full memory bandwidth needs tens of KB in flight per processor, so small tiles take more stages.
Larger tiles read less in total.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.model.kernels.base import BLOCK

MIN_PART_WIDTH = 1024
"""Minimum number of values in a part if a width is summed in parts, which costs one more launch."""
MIN_STAGES = 3
MAX_STAGES = 8


class Tile(NamedTuple):
    """Tile of a product and its launch options.

    Attributes:
        block_m: Number of rows per program.
        block_n: Number of outputs per program.
        block_k: Number of values that a program multiplies at once.
        num_parts: Number of parts that the width is summed in.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_parts: int = 1

    def options(self, *names: str) -> dict[str, int]:
        """Return keyword arguments for a kernel launch.

        ``names`` are the kernel's parameters for block_m, block_n and block_k, in this order.
        """
        blocks = zip(names, self[:3], strict=True)
        return {**dict(blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}


EXACT = Tile(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=3)
"""Tile for fp32, which tensor cores do not multiply exactly."""


def tile_for_product(
    rows: tuple[int, int],
    shape: tuple[int, int, int],
    x_w: tuple[Tensor, Tensor],
    busy: int,
    is_cut: bool,
) -> Tile:
    """Choose the tile of a product.

    Args:
        rows: Number of rows per matrix, and number of matrices.
        shape: Number of halves of a matrix, outputs of each half, and width.
        x_w: Inputs and weights.
        busy: Number of processors to occupy.
        is_cut: The width may be summed in parts.
    """
    x, w = x_w
    if x.dtype == torch.float32:
        return EXACT
    block_m = _block_m(rows[0])
    if w.element_size() > 1:
        return _with_stages(block_m=block_m, block_n=128, block_k=64, x_w=x_w)
    num_halves, num_out, width = shape
    num_tiles = rows[1] * -(-rows[0] // block_m)
    most_parts = max(1, width // MIN_PART_WIDTH) if is_cut else 1
    for block_n in (128, 64, 32, 16) if block_m >= 64 else (64, 32, 16):
        num_programs = max(1, num_tiles * num_halves * -(-num_out // block_n))
        if num_programs * most_parts >= busy:
            break
    num_groups = -(-width // BLOCK)
    part = -(-num_groups // max(1, min(most_parts, -(-2 * busy // num_programs))))
    return _with_stages(block_m=block_m, block_n=block_n, block_k=BLOCK, x_w=x_w)._replace(
        num_parts=-(-num_groups // part)
    )


def tile_for_experts(
    num_pairs: int, x: Tensor, w: Tensor, block_n: int, num_matrices: int = 1
) -> Tile:
    """Choose the tile for ``num_pairs`` pairs per expert and ``block_n`` outputs per matrix."""
    if x.dtype == torch.float32:
        return EXACT
    return _with_stages(
        block_m=min(64, _block_m(num_pairs)),
        block_n=block_n,
        block_k=BLOCK,
        x_w=(x, w),
        num_matrices=num_matrices,
    )


def _block_m(num_rows: int) -> int:
    return next((m for m in (16, 32, 64) if num_rows <= m), 128)


def _with_stages(
    block_m: int, block_n: int, block_k: int, x_w: tuple[Tensor, Tensor], num_matrices: int = 1
) -> Tile:
    """Return the tile with the most stages that still let several programs share a processor."""
    x, w = x_w
    rows = block_m * x.element_size() + num_matrices * block_n * w.element_size()
    room = (64 if block_m <= 32 else 108) * 1024
    num_stages = min(MAX_STAGES, max(MIN_STAGES, room // (rows * block_k)))
    is_large = block_m * block_n * num_matrices * w.element_size() >= 128 * 128
    return Tile(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=8 if is_large else 4,
        num_stages=num_stages,
    )
