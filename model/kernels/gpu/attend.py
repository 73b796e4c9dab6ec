"""Absorbed MLA of decode steps over a paged latent cache, by Flash-Decoding (Dao et al., 2023).

All heads and query rows of a sequence share its latents. A program takes a block of (query, head)
pairs and a part of the context, and reads each slot once, as key and as value. Page tables and
lengths are read on the device. The parts of a context are merged by their log-sum-exp.

Shape legend: B sequences, Q query rows of each, X = B * Q, H heads, C latent width, R rotary
width, M pairs of a program, S slots of a tile, P parts of the context.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import AttentionMetadata
from tandem.model.kernels.gpu.rotary import rotated
from tandem.model.kernels.gpu.softmax import seen, weighed

MAX_PARTS = 128
MERGED_AT_ONCE = 4096
"""Number of values, over all parts, that one merging program reads."""
MIN_SLOTS = tl.constexpr(64)
"""Minimum number of slots in a non-empty part. Each part adds a result that must be written and
merged."""
CHECKED_AT_ONCE = tl.constexpr(16)
"""Number of slots that are checked for non-finite values at once."""
LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
    q_XHC: Tensor,
    pe_XHR: Tensor,
    attn: AttentionMetadata,
    context_lens_BQ: Tensor,
    num_processors: int,
) -> Tensor:
    """Attend with absorbed queries: [X, H, C]. The rotary part ``pe_XHR`` is rotated here.

    All contexts are split into the same number of parts, enough to occupy ``num_processors``.
    """
    num_rows, num_heads, width = q_XHC.shape
    (num_seqs, num_q), num_pe = context_lens_BQ.shape, pe_XHR.shape[2]
    lens = context_lens_BQ.contiguous()
    bits = lens if attn.bits_BQ is None else attn.bits_BQ.contiguous()
    is_exact = q_XHC.dtype == torch.float32
    block_m = min(16 if is_exact else 64, max(16, triton.next_power_of_2(num_q * num_heads)))
    num_blocks = triton.cdiv(num_q * num_heads, block_m)
    at_once = num_processors * (1 if block_m == 64 else 2)
    max_splits = max(1, at_once // (num_seqs * num_blocks))
    num_parts = min(MAX_PARTS, 1 << (max_splits.bit_length() - 1))
    # A single part needs no merge, so it is stored in the output's dtype.
    kind = q_XHC.dtype if num_parts == 1 else torch.float32
    part = q_XHC.new_empty(num_rows, num_heads, num_parts, width, dtype=kind)
    lse = q_XHC.new_empty(num_rows, num_heads, num_parts, dtype=torch.float32)
    page_size = attn.cache.shape[1]
    block_s = 16 if is_exact else 64 if block_m == 64 and page_size % 64 == 0 else 32
    _attend[(num_blocks, num_seqs, num_parts)](
        *(q_XHC, pe_XHR, attn.cos, attn.sin, attn.cache, attn.page_table_BP, lens, bits),
        *(part, lse, attn.scale),
        *(*q_XHC.stride()[:2], *pe_XHR.stride()[:2], attn.page_table_BP.stride(0), num_q),
        NUM_HEADS=num_heads,
        C=width,
        R=num_pe,
        PAGE_SIZE=page_size,
        NUM_PARTS=num_parts,
        IS_INTERLEAVED=attn.is_interleaved,
        IS_TREE=attn.bits_BQ is not None,
        TAIL=_tail(num_q, attn.bits_BQ is not None),
        BLOCK_M=block_m,
        BLOCK_S=block_s,
        BLOCK_C=triton.next_power_of_2(width),
        BLOCK_R=max(16, triton.next_power_of_2(num_pe)),
        num_warps=4 if block_m == 16 else 8,
        num_stages=2 if block_s == 64 else 3,
    )
    return part[:, :, 0] if num_parts == 1 else merged(part, lse, q_XHC.dtype)


def _tail(num_q: int, is_tree: bool) -> int:
    """Return the number of slots that only some queries of a sequence see, rounded up.

    These slots follow the shortest context among the sequence's queries.
    """
    return 64 if is_tree else triton.cdiv(num_q - 1, CHECKED_AT_ONCE.value) * CHECKED_AT_ONCE.value


def merged(part_XHPC: Tensor, lse_XHP: Tensor, dtype: torch.dtype) -> Tensor:
    """Merge the parts of each context by their log-sum-exp: [X, H, C]."""
    num_rows, num_heads, num_parts, width = part_XHPC.shape
    out_XHC = torch.empty(num_rows, num_heads, width, dtype=dtype, device=part_XHPC.device)
    block_p, block_c = triton.next_power_of_2(num_parts), triton.next_power_of_2(width)
    block_c = min(block_c, max(128, MERGED_AT_ONCE // block_p))
    _merge[(num_rows * num_heads, triton.cdiv(width, block_c))](
        *(part_XHPC, lse_XHP, out_XHC),
        C=width,
        NUM_PARTS=num_parts,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
    )
    return out_XHC


@triton.jit
def _attend(
    q,
    pe,
    cos,
    sin,
    cache,
    table,
    lens,
    bits,
    part,
    lse,
    scale,
    q_row,
    q_head,
    pe_row,
    pe_head,
    table_row,
    num_q,
    NUM_HEADS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_TREE: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    seq, of = tl.program_id(1), tl.program_id(2)
    pair_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_pair_M = pair_M < num_q * NUM_HEADS
    head_M, row_M = pair_M % NUM_HEADS, seq * num_q + pair_M // NUM_HEADS
    len_M = tl.load(lens + row_M, mask=is_pair_M, other=0).to(tl.int32)
    bits_M = tl.load(bits + row_M, mask=is_pair_M, other=0) if IS_TREE else len_M
    # Some of the 64 slots that the tree bits address may have no page.
    longest = tl.minimum(tl.max(len_M, 0) + (64 if IS_TREE else 0), table_row * PAGE_SIZE)
    num_slots = tl.maximum(tl.cdiv(longest, NUM_PARTS), MIN_SLOTS)
    num_slots = tl.cdiv(num_slots, BLOCK_S) * BLOCK_S
    first = of * num_slots
    end = tl.minimum(first + num_slots, longest)

    c_C, r_R, s_S = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    is_c, is_r, is_m = (c_C < C)[None, :], (r_R < R)[None, :], is_pair_M[:, None]
    at_M = row_M * q_row + head_M * q_head
    q_MC = tl.load(q + at_M[:, None] + c_C[None, :], mask=is_m & is_c, other=0.0)
    at_M = row_M * pe_row + head_M * pe_head
    q_MR = rotated(pe, at_M, cos, sin, row_M, r_R, is_m & is_r, R, IS_INTERLEAVED).to(q_MC.dtype)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MC = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    IS_WHOLE: tl.constexpr = PAGE_SIZE % BLOCK_S == 0
    pages = table + seq * table_row
    shortest, broken = end, tl.full([], 0, tl.int64)
    if TAIL > 0:
        shortest = tl.min(tl.where(is_pair_M, len_M, longest), 0)
        if shortest < end:
            broken = _broken(cache, pages, shortest, end, TAIL, C + R, PAGE_SIZE, 2 * BLOCK_C)
    page = _page(pages, first, end, IS_WHOLE, PAGE_SIZE)
    for start in range(first, end, BLOCK_S):
        slot_S = start + s_S
        is_slot_S, is_broken_S = slot_S < end, slot_S < 0
        if TAIL > 0:
            after_S = slot_S - shortest
            is_broken_S = ((broken >> tl.maximum(after_S, 0)) & 1) * (after_S >= 0) == 1
        is_read_S1 = (is_slot_S & ~is_broken_S)[:, None]
        at_S = cache + _place(pages, page, start, s_S, end, IS_WHOLE, PAGE_SIZE) * (C + R)
        # Load the page a tile ahead. Otherwise loads of latents would wait for it.
        page = _page(pages, start + BLOCK_S, end, IS_WHOLE, PAGE_SIZE)
        k_SC = tl.load(at_S[:, None] + c_C[None, :], mask=is_read_S1 & is_c, other=0.0)
        k_SR = tl.load(at_S[:, None] + C + r_R[None, :], mask=is_read_S1 & is_r, other=0.0)
        score_MS = tl.dot(q_MC, tl.trans(k_SC), input_precision="ieee")
        score_MS = tl.dot(q_MR, tl.trans(k_SR), score_MS, input_precision="ieee")
        is_seen_MS = seen(slot_S, len_M, bits_M, IS_TREE) & is_slot_S[None, :]
        score_MS = tl.where(is_seen_MS, score_MS * (scale * LOG2_E), float("-inf"))
        if TAIL > 0:
            score_MS = tl.where(is_seen_MS & is_broken_S[None, :], float("nan"), score_MS)
        top_M, sum_M, out_MC = weighed(score_MS, k_SC, top_M, sum_M, out_MC)

    at_M = (row_M * NUM_HEADS + head_M) * NUM_PARTS + of
    is_seen_M = sum_M != 0  # also true for NaN
    safe_M = tl.where(is_seen_M, sum_M, 1.0)
    lse_M = tl.where(is_seen_M, top_M + tl.log2(safe_M), float("-inf"))
    tl.store(lse + at_M, lse_M, mask=is_pair_M)
    where_MC = part + at_M.to(tl.int64)[:, None] * C + c_C[None, :]
    is_told_MC = is_m & is_c & (is_seen_M[:, None] | (NUM_PARTS == 1))
    tl.store(where_MC, (out_MC / safe_M[:, None]).to(part.dtype.element_ty), mask=is_told_MC)


@triton.jit
def _broken(
    cache,
    pages,
    first,
    end,
    TAIL: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Return a mask whose bit i is set if the entry at slot ``first`` + i < ``end`` is non-finite.

    Such entries are read as 0. Otherwise they would spoil even queries that do not see them,
    because 0 * NaN is NaN. Queries that see one get the score NaN.
    """
    bits, w_W = tl.full([], 0, tl.int64), tl.arange(0, BLOCK_W)
    for i in tl.static_range(0, TAIL, CHECKED_AT_ONCE):
        t_T = i + tl.arange(0, CHECKED_AT_ONCE)
        is_slot_T = first + t_T < end
        at_T = cache + _place(pages, 0, first, t_T, end, False, PAGE_SIZE) * WIDTH
        is_value_TW = is_slot_T[:, None] & (w_W < WIDTH)[None, :]
        value_TW = tl.load(at_T[:, None] + w_W[None, :], mask=is_value_TW, other=0.0)
        is_number_TW = tl.abs(value_TW.to(tl.float32)) < float("inf")
        is_number_T = tl.min(is_number_TW.to(tl.int32), 1)
        bits += tl.sum((1 - is_number_T).to(tl.int64) << t_T, 0)
    return bits


@triton.jit
def _page(table, start, end, IS_WHOLE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the page of a tile whose slots are all in one page, 0 for other tiles."""
    page = tl.full([], 0, tl.int64)
    if IS_WHOLE:
        page = tl.load(table + start // PAGE_SIZE, mask=start < end, other=0).to(tl.int64)
    return page


@triton.jit
def _place(table, page, start, s_S, end, IS_WHOLE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the physical slots of a tile."""
    if IS_WHOLE:
        return page * PAGE_SIZE + start % PAGE_SIZE + s_S
    else:
        slot_S = start + s_S
        page_S = tl.load(table + slot_S // PAGE_SIZE, mask=slot_S < end, other=0)
        return page_S.to(tl.int64) * PAGE_SIZE + slot_S % PAGE_SIZE


@triton.jit
def _merge(
    part,
    lse,
    out,
    C: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    p_P, c_C = tl.arange(0, BLOCK_P), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at_P = pair * NUM_PARTS + p_P
    lse_P = tl.load(lse + at_P, mask=p_P < NUM_PARTS, other=float("-inf"))
    is_seen_P = lse_P != float("-inf")
    top = tl.max(lse_P, 0)
    weight_P = tl.where(is_seen_P, tl.exp2(lse_P - top), 0.0)
    # Parts without visible slots were not written.
    is_there_PC = is_seen_P[:, None] & (c_C < C)[None, :]
    part_PC = tl.load(part + at_P[:, None] * C + c_C[None, :], mask=is_there_PC, other=0.0)
    out_C = tl.sum(part_PC * weight_P[:, None], 0) / tl.sum(weight_P, 0)
    tl.store(out + pair * C + c_C, out_C.to(out.dtype.element_ty), mask=c_C < C)
