"""Products with FP8 matrices in blocks: of rows as they are (W8A16, which decode takes), or of rows
that were quantised before (W8A8, which prefill takes; DeepSeek-V3 report, 3.3.2).

Every 128 values have a sum of their own, which is scaled and added in fp32. A program computes a
tile of rows, all of one matrix, by a block of outputs; nothing waits for how rows are spread.

Shape legend: N rows of x, K their width, M outputs, S matrices (slots of experts), P rows of the
result sorted by slot, G groups of 128 values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.base import BLOCK, Blocks
from model.kernels.gpu.experts import QUANTUM, scaled_dot, silu_mul
from model.kernels.gpu.pairs import by_slot

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-4)
"""Of what a group's largest is taken for (spec §6)."""
QUANTISED_AT_ONCE = 16
"""Of 128 values that one program quantises."""


class Sorted(NamedTuple):
    """Rows of a result by their slots, of which each begins at ``starts_S`` [S + 1]. Row p is that
    of pair ``order_P[p]``: of x's row ``tokens_P[pair]``, or pair // ``per_token``."""

    order_P: Tensor
    starts_S: Tensor
    tokens_P: Tensor | None
    per_token: int


def quantised(x_NK: Tensor, by_powers: bool) -> Blocks:
    """Each 128 values of a row by their largest: values [N, K] FP8, factors [N, K / 128] fp32,
    ``by_powers`` of two or any (spec §6, scale_fmt)."""
    num_rows, width = x_NK.shape
    num_groups = triton.cdiv(width, BLOCK)
    values_NK = torch.empty(num_rows, width, dtype=FP8, device=x_NK.device)
    scales_NG = torch.empty(num_rows, num_groups, device=x_NK.device)
    _quantise[(triton.cdiv(num_rows * num_groups, QUANTISED_AT_ONCE),)](
        *(x_NK, values_NK, scales_NG, num_rows, x_NK.stride(0)),
        K=width,
        BY_POWERS=by_powers,
        BLOCK_G=QUANTISED_AT_ONCE,
    )
    return Blocks(values_NK, scales_NG)


def product(
    x: Tensor | Blocks,
    w: Blocks,
    dtype: torch.dtype,
    num_processors: int,
    num_parts: int = 1,
    rows: Sorted | None = None,
    is_back: bool = False,
) -> Tensor:
    """x [N, K], or what ``quantised`` made of it, times w [S, M, K], whose ``num_parts`` (gate and
    up) have scales of their own: [N, M] of slot 0, or [P, M] of sorted ``rows``. If it ``is_back``,
    rows of x are sorted and those of the result are pairs again. Rows of slot S are undefined."""
    values, scales = x if isinstance(x, Blocks) else (x, x)
    num_slots, num_out, width = w.values.shape
    num_rows, part = len(values) if rows is None else len(rows.order_P), num_out // num_parts
    is_exact = values.dtype == torch.float32
    num_sorted = 0 if rows is None else num_slots
    num_tiles, block_m, block_n = _tiles(num_rows, num_sorted, num_out, num_processors, is_exact)
    out = torch.empty(num_rows, num_out, dtype=dtype, device=values.device)
    order, starts = (values, values) if rows is None else rows[:2]
    tokens = None if rows is None else rows.tokens_P
    _product[(num_tiles, num_parts * triton.cdiv(part, block_n))](
        *(values, scales, *w, order, starts, values if tokens is None else tokens, out),
        *(num_rows, values.stride(0), 1 if rows is None else rows.per_token),
        S=num_sorted,
        SLOTS=triton.next_power_of_2(num_slots),
        PARTS=num_parts,
        F=part,
        K=width,
        IS_QUANTISED=isinstance(x, Blocks),
        HAS_TOKENS=tokens is not None,
        IS_BACK=is_back,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=32 if is_exact else BLOCK,
        num_warps=8 if block_m * block_n >= 128 * 64 else 4,
        num_stages=3,
    )
    return out


def _tiles(
    num_rows: int, num_slots: int, num_out: int, num_processors: int, is_exact: bool
) -> tuple[int, int, int]:
    """The most tiles that rows may need, sorted by slots if there are any; how many rows each has;
    and how many outputs a program, as many as leave no processor idle."""
    per_slot = triton.cdiv(num_rows, num_slots or 1)
    block_m = next((m for m in (16, 32, 64) if per_slot <= m or is_exact), 128)
    num_tiles = triton.cdiv(num_rows, block_m) + min(num_slots, num_rows)
    wide = (n for n in (128, 64, 32) if num_tiles * triton.cdiv(num_out, n) >= num_processors)
    return num_tiles, block_m, 32 if is_exact else next(wide, 16)


def experts(
    x_NK: Tensor,
    tokens_P: Tensor | None,
    slots_P: Tensor,
    w1: Blocks,
    w2: Blocks,
    by_powers: bool,
    num_processors: int,
) -> Tensor:
    """See Kernels.experts, of rows quantised before each product: [P, D]."""
    order_P, starts_S = by_slot(slots_P, len(w1.values))
    rows = Sorted(order_P, starts_S, tokens_P, len(slots_P) // len(x_NK))
    given = x_NK.dtype, num_processors
    gate_up = product(quantised(x_NK, by_powers), w1, *given, num_parts=2, rows=rows)
    hidden = quantised(silu_mul(gate_up), by_powers)
    return product(hidden, w2, *given, rows=rows, is_back=True)


@triton.jit
def _quantise(
    x,
    values,
    scales,
    num_rows,
    x_row,
    K: tl.constexpr,
    BY_POWERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    NUM_K: tl.constexpr = (K + QUANTUM - 1) // QUANTUM
    group_G = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    row_G, is_row = group_G // NUM_K, group_G < num_rows * NUM_K
    k_GK = (group_G % NUM_K)[:, None] * QUANTUM + tl.arange(0, QUANTUM)[None, :]
    is_value = is_row[:, None] & (k_GK < K)
    x_GK = tl.load(x + row_G[:, None] * x_row + k_GK, mask=is_value, other=0.0).to(tl.float32)
    scale_G = tl.maximum(tl.max(tl.abs(x_GK), 1), LEAST) / LARGEST
    if BY_POWERS:
        scale_G = tl.exp2(tl.ceil(tl.log2(scale_G)))
    value_GK = (x_GK / scale_G[:, None]).to(values.dtype.element_ty)
    tl.store(values + row_G[:, None] * K + k_GK, value_GK, mask=is_value)
    tl.store(scales + group_G, scale_G, mask=is_row)


@triton.jit
def _tile(starts, tile, num_rows, S: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Slot, first row and end of a tile; the slot is no less than S where there is none."""
    slot = tl.full([], 0, tl.int32)
    begin, end = tile * BLOCK_M, num_rows
    if S > 0:
        s_S = tl.arange(0, SLOTS)
        first_S = tl.load(starts + s_S, mask=s_S < S, other=0)
        num_S = tl.load(starts + s_S + 1, mask=s_S < S, other=0) - first_S
        tiles_S = (num_S + BLOCK_M - 1) // BLOCK_M
        slot = tl.sum((tl.cumsum(tiles_S, 0) <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(s_S < slot, tiles_S, 0), 0)
        begin = tl.sum(tl.where(s_S == slot, first_S, 0), 0) + (tile - before) * BLOCK_M
        end = tl.sum(tl.where(s_S == slot, first_S + num_S, 0), 0)
    return slot, begin, end


@triton.jit
def _product(
    x,
    x_scales,
    w,
    w_scales,
    order,
    starts,
    tokens,
    out,
    num_rows,
    x_row,
    per_token,
    S: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    IS_BACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    NUM_F: tl.constexpr = (F + QUANTUM - 1) // QUANTUM
    NUM_K: tl.constexpr = (K + QUANTUM - 1) // QUANTUM
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    part, first_n = tl.program_id(1) // NUM_N, tl.program_id(1) % NUM_N * BLOCK_N
    slot, begin, end = _tile(starts, tl.program_id(0), num_rows, S, SLOTS, BLOCK_M)
    if begin >= end:
        return
    place_M, n_N = begin + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    k_K = tl.arange(0, BLOCK_K)
    is_m, is_n = (place_M < end)[:, None], (n_N < F)[:, None]
    from_M, to_M = place_M, place_M
    if S > 0:
        pair_M = tl.load(order + place_M, mask=place_M < end, other=0)
        if IS_BACK:
            to_M = pair_M
        elif HAS_TOKENS:
            from_M = tl.load(tokens + pair_M, mask=place_M < end, other=0)
        else:
            from_M = pair_M // per_token
    matrix = slot.to(tl.int64) * PARTS + part
    row_MK = x + from_M.to(tl.int64)[:, None] * x_row + k_K[None, :]
    row_NK = w + (matrix * F + n_N[:, None]) * K + k_K[None, :]
    scale = w_scales + (matrix * NUM_F + first_n // QUANTUM) * NUM_K
    scale_M = x_scales + from_M.to(tl.int64) * NUM_K
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        is_k = (k + k_K < K)[None, :]
        x_MK = tl.load(row_MK + k, mask=is_m & is_k, other=0.0)
        w_NK = tl.load(row_NK + k, mask=is_n & is_k, other=0.0)
        factor = tl.load(scale + k // QUANTUM)
        if IS_QUANTISED:
            factor_M = tl.load(scale_M + k // QUANTUM, mask=place_M < end, other=0.0) * factor
            sum_MN += tl.dot(x_MK, tl.trans(w_NK)) * factor_M[:, None]
        else:
            sum_MN += scaled_dot(x_MK, w_NK, factor)
    to_MN = out + to_M.to(tl.int64)[:, None] * (PARTS * F) + part * F + n_N[None, :]
    tl.store(to_MN, sum_MN.to(out.dtype.element_ty), mask=is_m & (n_N < F)[None, :])
