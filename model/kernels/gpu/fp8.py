"""FP8 on GPUs: quantisation of rows, and building blocks of products with FP8 weights.

Shape legend: N rows, K their width, G groups of 128 values; M rows of x by N of w in a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import BLOCK, Fp8BlockWeight

FP8 = torch.float8_e4m3fn
MAX_FP8 = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(1e-4)
"""Minimum for the largest absolute value of a group, so that its scale is never 0."""
QUANTISE_BLOCK_ROWS = 16
"""Number of groups of 128 values that one program quantises."""
QUANTUM = tl.constexpr(BLOCK)
"""Number of values in an FP8 group. Tile widths must divide it."""


def quantise(x_NK: Tensor, power_of_2_scales: bool) -> Fp8BlockWeight:
    """Quantise each 128 values of a row, scaled by their largest absolute value (arXiv:2412.19437,
    3.3.2).

    Returns FP8 values [N, K] and fp32 scales [N, ceil(K / 128)]. With ``power_of_2_scales`` the
    scales are rounded up to powers of two (``scale_fmt`` ue8m0 of the checkpoint).
    """
    num_rows, width = x_NK.shape
    num_groups = triton.cdiv(width, BLOCK)
    values_NK = torch.empty(num_rows, width, dtype=FP8, device=x_NK.device)
    scales_NG = torch.empty(num_rows, num_groups, device=x_NK.device)
    _quantise[(triton.cdiv(num_rows * num_groups, QUANTISE_BLOCK_ROWS),)](
        *(x_NK, values_NK, scales_NG, num_rows, x_NK.stride(0)),
        K=width,
        POWER_OF_2_SCALES=power_of_2_scales,
        BLOCK_G=QUANTISE_BLOCK_ROWS,
    )
    return Fp8BlockWeight(values_NK, scales_NG)


@triton.jit
def factor_at(scale, k, K: tl.constexpr):
    """Load the scale of the block at ``k``.

    Loops load the scale of the next block early, because Triton pipelines only the dot's operands.
    """
    return tl.load(scale + k // QUANTUM, mask=k < K, other=0.0)


@triton.jit
def mixed_dot(x_MK, w_NK):
    """Multiply x by FP8 weights that are converted to the dtype of x.

    The conversion goes through fp32, because the direct one to bf16 is slower than reading memory.
    """
    w_NK = w_NK.to(tl.float32).to(x_MK.dtype)
    return tl.dot(x_MK, tl.trans(w_NK), input_precision="ieee")


@triton.jit
def _quantise(
    x,
    values,
    scales,
    num_rows,
    x_row,
    K: tl.constexpr,
    POWER_OF_2_SCALES: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    NUM_K: tl.constexpr = (K + QUANTUM - 1) // QUANTUM
    group_G = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    row_G = group_G // NUM_K
    is_row = group_G < num_rows * NUM_K
    k_GK = (group_G % NUM_K)[:, None] * QUANTUM + tl.arange(0, QUANTUM)[None, :]
    is_value = is_row[:, None] & (k_GK < K)
    x_GK = tl.load(x + row_G[:, None] * x_row + k_GK, mask=is_value, other=0.0).to(tl.float32)
    scale_G = tl.maximum(tl.max(tl.abs(x_GK), 1), MIN_SCALE) / MAX_FP8
    if POWER_OF_2_SCALES:
        scale_G = tl.exp2(tl.ceil(tl.log2(scale_G)))
    value_GK = (x_GK / scale_G[:, None]).to(values.dtype.element_ty)
    tl.store(values + row_G[:, None] * K + k_GK, value_GK, mask=is_value)
    tl.store(scales + group_G, scale_G, mask=is_row)
