"""Products of tiles of rows: with FP8 matrices in blocks, of rows as they are (W8A16, which decode
takes), or of rows that were quantised before (W8A8, which prefill takes; DeepSeek-V3 report,
3.3.2); and of many rows with the experts of other types.

With blocks every 128 values have a sum of their own, which is scaled and added in fp32. A program
computes a tile of rows, all of one matrix, by a block of outputs, of the whole width or of a part;
nothing waits for how rows are spread.

Shape legend: N rows of x, K their width, M outputs, S matrices (slots of experts), P rows of the
result sorted by slot, G groups of 128 values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import BLOCK, Fp8BlockWeight, Weights
from tandem.model.kernels.gpu import tiles
from tandem.model.kernels.gpu.experts import silu_mul, values_of
from tandem.model.kernels.gpu.fp8 import QUANTUM, factor_at, mixed_dot, quantise
from tandem.model.kernels.gpu.pairs import by_slot

TILES_AT_ONCE = tl.constexpr(8)
"""Of rows, all of whose outputs are computed before the next ones."""


class SortedPairs(NamedTuple):
    """Rows of a result by their slots, of which each begins at ``starts_S`` [S + 1]. Row p is that
    of pair ``order_P[p]``: of x's row ``tokens_P[pair]``, or pair // ``per_token``. All but one of
    ``num_ranks`` of them are expected elsewhere."""

    order_P: Tensor
    starts_S: Tensor
    tokens_P: Tensor | None
    per_token: int
    num_ranks: int = 1


def product(
    x: Tensor | Fp8BlockWeight,
    w: Weights,
    dtype: torch.dtype,
    num_processors: int,
    num_halves: int = 1,
    rows: SortedPairs | None = None,
    is_back: bool = False,
) -> Tensor:
    """x [N, K], or what ``quantised`` made of it, times w [S, M, K], whose ``num_halves`` (gate and
    up) have scales of their own: [N, M] of slot 0, or [P, M] of sorted ``rows``. If it ``is_back``,
    rows of x are sorted and those of the result are pairs again. Rows of slot S are undefined."""
    (values, x_scales), (matrices, w_scales) = values_of(x), values_of(w)
    num_slots, num_out, width = matrices.shape
    num_rows, half = len(values) if rows is None else len(rows.order_P), num_out // num_halves
    num_sorted, num_ranks = (0, 1) if rows is None else (num_slots, rows.num_ranks)
    many = min(num_sorted, num_rows)
    spread = triton.cdiv(num_rows, (num_sorted or 1) * num_ranks), many or 1
    shape, is_cut = (num_halves, half, width), rows is None
    tile = tiles.tile_for_product(spread, shape, (values, matrices), num_processors, is_cut)
    num_tiles = triton.cdiv(num_rows, tile.block_m) + many
    num_cut = num_halves * triton.cdiv(half, tile.block_n)
    is_whole = tile.num_parts == 1
    sums = (num_rows, num_out) if is_whole else (tile.num_parts, num_rows, num_out)
    out = torch.empty(sums, dtype=dtype if is_whole else torch.float32, device=values.device)
    order, starts = (values, values) if rows is None else rows[:2]
    tokens = None if rows is None else rows.tokens_P
    _product[(num_tiles * num_cut, tile.num_parts)](
        *(values, x_scales, matrices, w_scales),
        *(order, starts, values if tokens is None else tokens, out),
        *(num_rows, values.stride(0), 1 if rows is None else rows.per_token),
        S=num_sorted,
        SLOTS=triton.next_power_of_2(num_slots),
        HALVES=num_halves,
        F=half,
        K=width,
        PART_K=triton.cdiv(width, tile.num_parts * BLOCK) * BLOCK,
        HAS_BLOCKS=isinstance(w, Fp8BlockWeight),
        IS_QUANTISED=isinstance(x, Fp8BlockWeight),
        HAS_TOKENS=tokens is not None,
        IS_BACK=is_back,
        **tile.options("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    )
    return out if is_whole else _added(out, dtype)


def _added(parts_ANM: Tensor, dtype: torch.dtype) -> Tensor:
    """One after the other: [N, M]."""
    out_NM = torch.empty(parts_ANM.shape[1:], dtype=dtype, device=parts_ANM.device)
    num = out_NM.numel()
    _add[(triton.cdiv(num, 1024),)](parts_ANM, out_NM, num, A=len(parts_ANM), BLOCK=1024)
    return out_NM


def fused_experts(
    x_NK: Tensor,
    tokens_P: Tensor | None,
    slots_P: Tensor,
    w1: Weights,
    w2: Weights,
    num_processors: int,
    num_ranks: int = 1,
    power_of_2_scales: bool | None = None,
) -> Tensor:
    """See Kernels.experts: [P, D]; of rows quantised before each product, ``power_of_2_scales`` of
    two or any, unless it is None."""
    order_P, starts_S = by_slot(slots_P, len(values_of(w1)[0]))
    rows = SortedPairs(order_P, starts_S, tokens_P, len(slots_P) // len(x_NK), num_ranks)
    given = x_NK.dtype, num_processors

    def read(x: Tensor) -> Tensor | Fp8BlockWeight:
        return x if power_of_2_scales is None else quantise(x, power_of_2_scales)

    gate_up = product(read(x_NK), w1, *given, num_halves=2, rows=rows)
    return product(read(silu_mul(gate_up)), w2, *given, rows=rows, is_back=True)


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
def _turn(NUM_N: tl.constexpr):
    """Tile of rows and block of outputs of this program, such that those that run at once share
    what they read: they have all blocks of a few tiles, which are of few slots."""
    first = tl.program_id(0) // (TILES_AT_ONCE * NUM_N) * TILES_AT_ONCE
    num = min(tl.num_programs(0) // NUM_N - first, TILES_AT_ONCE)
    i = tl.program_id(0) - first * NUM_N
    return first + i % num, i // num


@triton.jit
def _factor(scale, scale_M, k, K: tl.constexpr, is_m, IS_QUANTISED: tl.constexpr):
    factor = factor_at(scale, k, K)
    if IS_QUANTISED:
        factor_M = tl.load(scale_M + k // QUANTUM, mask=is_m & (k < K), other=0.0)
        factor = (factor_M * factor)[:, None]
    return factor


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
    HALVES: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    PART_K: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
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
    tile, n = _turn(HALVES * NUM_N)
    half, first_n = n // NUM_N, n % NUM_N * BLOCK_N
    slot, begin, end = _tile(starts, tile, num_rows, S, SLOTS, BLOCK_M)
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
    matrix = slot.to(tl.int64) * HALVES + half
    row_MK = x + from_M.to(tl.int64)[:, None] * x_row + k_K[None, :]
    row_NK = w + (matrix * F + n_N[:, None]) * K + k_K[None, :]
    scale = w_scales + (matrix * NUM_F + first_n // QUANTUM) * NUM_K
    scale_M = x_scales + from_M.to(tl.int64) * NUM_K
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first_k = tl.program_id(1) * PART_K
    if HAS_BLOCKS:
        factor = _factor(scale, scale_M, first_k, K, place_M < end, IS_QUANTISED)
    for more in range(0, PART_K, BLOCK_K):
        k = first_k + more
        is_k = (k + k_K < K)[None, :]
        x_MK = tl.load(row_MK + k, mask=is_m & is_k, other=0.0)
        w_NK = tl.load(row_NK + k, mask=is_n & is_k, other=0.0)
        if HAS_BLOCKS:
            now = factor
            factor = _factor(scale, scale_M, k + BLOCK_K, K, place_M < end, IS_QUANTISED)
            if IS_QUANTISED:
                sum_MN += tl.dot(x_MK, tl.trans(w_NK)) * now
            else:
                sum_MN += mixed_dot(x_MK, w_NK) * now
        else:
            sum_MN = tl.dot(x_MK, tl.trans(w_NK), sum_MN, input_precision="ieee")
    to_M = tl.program_id(1).to(tl.int64) * num_rows + to_M
    to_MN = out + to_M[:, None] * (HALVES * F) + half * F + n_N[None, :]
    tl.store(to_MN, sum_MN.to(out.dtype.element_ty), mask=is_m & (n_N < F)[None, :])


@triton.jit
def _add(parts, out, num, A: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum_I = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(A):
        sum_I += tl.load(parts + a * num + i, mask=i < num, other=0.0)
    tl.store(out + i, sum_I.to(out.dtype.element_ty), mask=i < num)
