"""FP8 on a device: rows are quantised, and what was is multiplied.

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
"""Of what a group's largest is taken for (spec §6)."""
QUANTISE_BLOCK_ROWS = 16
"""Of 128 values that one program quantises."""
QUANTUM = tl.constexpr(BLOCK)
"""Of FP8; tiles divide it."""


def quantise(x_NK: Tensor, power_of_2_scales: bool) -> Fp8BlockWeight:
    """Each 128 values of a row by their largest: values [N, K] FP8, factors [N, K / 128] fp32,
    ``power_of_2_scales`` of two or any (spec §6, scale_fmt)."""
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
    """Of the block at k. A loop loads the next one early: no pipeline of a dot holds it."""
    return tl.load(scale + k // QUANTUM, mask=k < K, other=0.0)


@triton.jit
def mixed_dot(x_MK, w_NK):
    """With FP8, by way of fp32: straight to bf16 it takes a unit that is slower than memory."""
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
    row_G, is_row = group_G // NUM_K, group_G < num_rows * NUM_K
    k_GK = (group_G % NUM_K)[:, None] * QUANTUM + tl.arange(0, QUANTUM)[None, :]
    is_value = is_row[:, None] & (k_GK < K)
    x_GK = tl.load(x + row_G[:, None] * x_row + k_GK, mask=is_value, other=0.0).to(tl.float32)
    scale_G = tl.maximum(tl.max(tl.abs(x_GK), 1), MIN_SCALE) / MAX_FP8
    if POWER_OF_2_SCALES:
        scale_G = tl.exp2(tl.ceil(tl.log2(scale_G)))
    value_GK = (x_GK / scale_G[:, None]).to(values.dtype.element_ty)
    tl.store(values + row_G[:, None] * K + k_GK, value_GK, mask=is_value)
    tl.store(scales + group_G, scale_G, mask=is_row)
