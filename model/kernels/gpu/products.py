"""Tiled matrix products with FP8 weights, and grouped products of experts with many rows.

Inputs of FP8 weights are unquantised when decoding (W8A16), and FP8 in prefill (W8A8). Every 128
values are summed separately, and the sum is scaled and added in fp32 (arXiv:2412.19437, 3.3.2).
A program computes a tile of rows, all of one matrix, by a block of outputs. It sums the whole width
or a part of it. The host does not wait for the distribution of rows over matrices.

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
"""Number of row tiles whose outputs are all computed before the next row tiles, for cache reuse."""


class SortedPairs(NamedTuple):
    """Pairs of (token, expert) sorted by slot.

    Attributes:
        order_P: Pair of each sorted row.
        starts_S: First sorted row of each slot [S + 1].
        tokens_P: Row of x of each pair. None: pair // ``per_token``.
        per_token: Number of pairs per token.
        num_ranks: Number of ranks that share the pairs. About 1 / ``num_ranks`` of them are local.
    """

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
    """Multiply x [N, K] by the transposes of w [S, M, K]: [N, M], or [P, M] with ``rows``.

    Args:
        x: Rows, or the result of ``quantise``.
        w: One matrix, or one for each slot. Must be FP8 if ``x`` is.
        dtype: Dtype of the result.
        num_processors: Number of processors to occupy.
        num_halves: Number of parts of M with separate scales: 2 for gate and up, otherwise 1.
        rows: Pairs sorted by slot; each uses the matrix of its slot. Results of slot S are
            undefined. None: all rows use slot 0.
        is_back: True: x is sorted by slot, and the result is in pair order. False: x has one row
            per token, and the result is sorted by slot.
    """
    (values, x_scales), (matrices, w_scales) = values_of(x), values_of(w)
    num_slots, num_out, width = matrices.shape
    num_rows = len(values) if rows is None else len(rows.order_P)
    half = num_out // num_halves
    num_sorted, num_ranks = (0, 1) if rows is None else (num_slots, rows.num_ranks)
    many = min(num_sorted, num_rows)
    spread = triton.cdiv(num_rows, (num_sorted or 1) * num_ranks), many or 1
    shape = (num_halves, half, width)
    is_cut = rows is None
    tile = tiles.tile_for_product(
        rows=spread, shape=shape, x_w=(values, matrices), busy=num_processors, is_cut=is_cut
    )
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
    """Sum the A parts of each output in order: [N, M]."""
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
    """Implement ``Kernels.fused_experts``: [P, D].

    Inputs of both products are quantised unless ``power_of_2_scales`` is None.
    """
    order_P, starts_S = by_slot(slots_P, len(values_of(w1)[0]))
    rows = SortedPairs(
        order_P=order_P,
        starts_S=starts_S,
        tokens_P=tokens_P,
        per_token=len(slots_P) // len(x_NK),
        num_ranks=num_ranks,
    )
    options = x_NK.dtype, num_processors

    def read(x: Tensor) -> Tensor | Fp8BlockWeight:
        return x if power_of_2_scales is None else quantise(x, power_of_2_scales)

    gate_up = product(read(x_NK), w1, *options, num_halves=2, rows=rows)
    return product(read(silu_mul(gate_up)), w2, *options, rows=rows, is_back=True)


@triton.jit
def _tile(starts, tile, num_rows, S: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return slot, first row and end row of a tile. The slot is >= S if the tile is unused."""
    slot = tl.full([], 0, tl.int32)
    first_row = tile * BLOCK_M
    end = num_rows
    if S > 0:
        s_S = tl.arange(0, SLOTS)
        first_S = tl.load(starts + s_S, mask=s_S < S, other=0)
        num_S = tl.load(starts + s_S + 1, mask=s_S < S, other=0) - first_S
        tiles_S = (num_S + BLOCK_M - 1) // BLOCK_M
        slot = tl.sum((tl.cumsum(tiles_S, 0) <= tile).to(tl.int32), 0)
        before = tl.sum(tl.where(s_S < slot, tiles_S, 0), 0)
        first_row = tl.sum(tl.where(s_S == slot, first_S, 0), 0) + (tile - before) * BLOCK_M
        end = tl.sum(tl.where(s_S == slot, first_S + num_S, 0), 0)
    return slot, first_row, end


@triton.jit
def _turn(NUM_N: tl.constexpr):
    """Return the row tile and the output block of this program.

    Programs that run at the same time compute all blocks of a few row tiles, which belong to few
    slots. Thus they share the rows and weights that they read.
    """
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
    half = n // NUM_N
    first_n = n % NUM_N * BLOCK_N
    slot, first_row, end = _tile(starts, tile, num_rows, S, SLOTS, BLOCK_M)
    if first_row >= end:
        return
    place_M = first_row + tl.arange(0, BLOCK_M)
    n_N = first_n + tl.arange(0, BLOCK_N)
    k_K = tl.arange(0, BLOCK_K)
    is_m = (place_M < end)[:, None]
    is_n = (n_N < F)[:, None]
    from_M = place_M
    to_M = place_M
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
