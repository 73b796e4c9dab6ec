"""Routed experts of few (token, expert) pairs: two grouped products.

A program computes a block of outputs of one expert, for all pairs of the expert (pairs.py). An
expert has few pairs in a decode step, so its weights are read once. Pairs are not padded, and the
host does not wait for the routing.

Shape legend: N tokens, P (token, expert) pairs, S slots of experts, D hidden, F their width, T
tokens, K experts of a token, M pairs of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import Fp8BlockWeight, Weights
from tandem.model.kernels.gpu import tiles
from tandem.model.kernels.gpu.fp8 import QUANTUM, factor_at, mixed_dot
from tandem.model.kernels.gpu.pairs import pairs_at, pairs_of, slot_range

MIN_PROGRAMS = 512
"""Minimum number of programs that occupy a device. Below it, outputs are split more finely."""


def fused_experts(
    x_ND: Tensor,
    tokens_P: Tensor | None,
    slots_P: Tensor,
    w1: Weights,
    w2: Weights,
    num_ranks: int = 1,
) -> Tensor:
    """Implement ``Kernels.fused_experts``: [P, D], undefined where the slot is S."""
    (gate_up, scales1), (down, scales2) = values_of(w1), values_of(w2)
    num_pairs, (num_slots, double_width, dim) = len(slots_P), gate_up.shape
    width = double_width // 2
    dtype = x_ND.dtype
    device = x_ND.device
    pairs = pairs_of(slots_P, num_slots)
    pair_arguments = slots_P, pairs.order_P, pairs.starts_S, num_pairs, num_slots
    attn = {"BY_PAIR": pairs.by_pair, "NUM_SCANNED": pairs.num_scanned}
    each = triton.cdiv(num_pairs, num_slots * num_ranks), x_ND, gate_up
    hidden_PF = torch.empty(num_pairs, width, dtype=dtype, device=device)
    tile = tiles.tile_for_experts(*each, 32 if each[0] <= 16 else 64, num_matrices=2)
    _gate_up[(pairs.num_programs, triton.cdiv(width, tile.block_n))](
        *(x_ND, gate_up, scales1, slots_P if tokens_P is None else tokens_P, *pair_arguments),
        *(hidden_PF, x_ND.stride(0), num_pairs // len(x_ND)),
        D=dim,
        F=width,
        HAS_TOKENS=tokens_P is not None,
        HAS_BLOCKS=isinstance(w1, Fp8BlockWeight),
        **attn,
        **tile.options("BLOCK_M", "BLOCK_F", "BLOCK_K"),
    )
    out_PD = torch.empty(num_pairs, dim, dtype=dtype, device=device)
    is_busy = pairs.num_programs * dim >= 64 * MIN_PROGRAMS
    tile = tiles.tile_for_experts(*each, 64 if is_busy else 32)
    _down[(pairs.num_programs, triton.cdiv(dim, tile.block_n))](
        *(hidden_PF, down, scales2, *pair_arguments, out_PD),
        D=dim,
        F=width,
        HAS_BLOCKS=isinstance(w2, Fp8BlockWeight),
        **attn,
        **tile.options("BLOCK_M", "BLOCK_D", "BLOCK_K"),
    )
    return out_PD


def values_of(weights: Weights) -> tuple[Tensor, Tensor]:
    """Return values and scales. Without scales, the second item is a placeholder that is never
    read."""
    return weights if isinstance(weights, Fp8BlockWeight) else (weights, weights)


def silu_mul(gate_up_NF: Tensor) -> Tensor:
    """Compute silu(gate) * up of rows [gate, up]: [N, F]."""
    num_rows = len(gate_up_NF)
    width = gate_up_NF.shape[1] // 2
    out_NF = torch.empty(num_rows, width, dtype=gate_up_NF.dtype, device=gate_up_NF.device)
    _silu_mul[(num_rows, triton.cdiv(width, 1024))](*(gate_up_NF, out_NF), F=width, BLOCK_F=1024)
    return out_NF


@triton.jit
def _gate_up(
    x,
    w,
    scales,
    tokens,
    slots,
    order,
    starts,
    num_pairs,
    num_slots,
    hidden,
    x_row,
    per_token,
    D: tl.constexpr,
    F: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    NUM_SCANNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair_arguments = slots, order, starts, num_pairs, num_slots
    slot, first, end = slot_range(pair_arguments, BY_PAIR, NUM_SCANNED)
    f_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    k_K = tl.arange(0, BLOCK_K)
    is_f = (f_F < F)[:, None]
    gate = w + slot.to(tl.int64) * 2 * F * D + f_F[:, None] * D + k_K[None, :]
    NUM_F: tl.constexpr = (F + QUANTUM - 1) // QUANTUM
    NUM_D: tl.constexpr = (D + QUANTUM - 1) // QUANTUM
    scale = scales + (slot * 2 * NUM_F + tl.program_id(1) * BLOCK_F // QUANTUM) * NUM_D
    scale_up = scale + NUM_F * NUM_D
    for first_row in range(first, end, BLOCK_M):
        place_M = first_row + tl.arange(0, BLOCK_M)
        is_m = (place_M < end)[:, None]
        pair_M = pairs_at(pair_arguments, slot, place_M, end, NUM_SCANNED)
        if HAS_TOKENS:
            token_M = tl.load(tokens + pair_M, mask=place_M < end, other=0)
        else:
            token_M = pair_M // per_token
        row_MK = x + token_M.to(tl.int64)[:, None] * x_row + k_K[None, :]
        gate_MF = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
        up_MF = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
        if HAS_BLOCKS:
            factor = factor_at(scale, 0, D)
            factor_up = factor_at(scale_up, 0, D)
        for k in range(0, D, BLOCK_K):
            is_k = (k + k_K < D)[None, :]
            x_MK = tl.load(row_MK + k, mask=is_m & is_k, other=0.0)
            gate_FK = tl.load(gate + k, mask=is_f & is_k, other=0.0)
            up_FK = tl.load(gate + F * D + k, mask=is_f & is_k, other=0.0)
            if HAS_BLOCKS:
                now = factor
                now_up = factor_up
                factor = factor_at(scale, k + BLOCK_K, D)
                factor_up = factor_at(scale_up, k + BLOCK_K, D)
                gate_MF += mixed_dot(x_MK, gate_FK) * now
                up_MF += mixed_dot(x_MK, up_FK) * now_up
            else:
                gate_MF = tl.dot(x_MK, tl.trans(gate_FK), gate_MF, input_precision="ieee")
                up_MF = tl.dot(x_MK, tl.trans(up_FK), up_MF, input_precision="ieee")
        h_MF = gate_MF * tl.sigmoid(gate_MF) * up_MF
        where_MF = hidden + pair_M.to(tl.int64)[:, None] * F + f_F[None, :]
        tl.store(where_MF, h_MF.to(hidden.dtype.element_ty), mask=is_m & (f_F < F)[None, :])


@triton.jit
def _down(
    hidden,
    w,
    scales,
    slots,
    order,
    starts,
    num_pairs,
    num_slots,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    NUM_SCANNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair_arguments = slots, order, starts, num_pairs, num_slots
    slot, first, end = slot_range(pair_arguments, BY_PAIR, NUM_SCANNED)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    k_K = tl.arange(0, BLOCK_K)
    row_DK = w + slot.to(tl.int64) * D * F + d_D[:, None] * F + k_K[None, :]
    NUM_F: tl.constexpr = (F + QUANTUM - 1) // QUANTUM
    NUM_D: tl.constexpr = (D + QUANTUM - 1) // QUANTUM
    scale = scales + (slot * NUM_D + tl.program_id(1) * BLOCK_D // QUANTUM) * NUM_F
    for first_row in range(first, end, BLOCK_M):
        place_M = first_row + tl.arange(0, BLOCK_M)
        is_m = (place_M < end)[:, None]
        pair_M = pairs_at(pair_arguments, slot, place_M, end, NUM_SCANNED)
        row_MK = hidden + pair_M.to(tl.int64)[:, None] * F + k_K[None, :]
        out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if HAS_BLOCKS:
            factor = factor_at(scale, 0, F)
        for k in range(0, F, BLOCK_K):
            is_k = (k + k_K < F)[None, :]
            h_MK = tl.load(row_MK + k, mask=is_m & is_k, other=0.0)
            w_DK = tl.load(row_DK + k, mask=(d_D < D)[:, None] & is_k, other=0.0)
            if HAS_BLOCKS:
                now = factor
                factor = factor_at(scale, k + BLOCK_K, F)
                out_MD += mixed_dot(h_MK, w_DK) * now
            else:
                out_MD = tl.dot(h_MK, tl.trans(w_DK), out_MD, input_precision="ieee")
        where_MD = out + pair_M.to(tl.int64)[:, None] * D + d_D[None, :]
        tl.store(where_MD, out_MD.to(out.dtype.element_ty), mask=is_m & (d_D < D)[None, :])


@triton.jit
def _silu_mul(gate_up, out, F: tl.constexpr, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + row * F + f, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=f < F)
