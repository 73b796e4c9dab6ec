"""Grouped-query attention of decode steps over a paged cache, by Flash-Decoding (see attend.py).

Shape legend: B sequences, Q query rows of each, H heads, G groups, K head width, M (query, head)
pairs of a program, S slots of a tile, P parts of the context.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import AttentionMetadata
from tandem.model.kernels.gpu.attend import LOG2_E, MAX_PARTS, MIN_SLOTS, merged
from tandem.model.kernels.gpu.rotary import rotated
from tandem.model.kernels.gpu.softmax import only_seen, seen, weighed


def attend(
    q_XHK: Tensor, attn: AttentionMetadata, context_lens_BQ: Tensor, num_processors: int
) -> Tensor:
    """Attend with queries that are rotated here: [X, H, K].

    All contexts are split into the same number of parts, enough to occupy ``num_processors``.
    """
    num_rows, num_heads, width = q_XHK.shape
    num_seqs, num_q = context_lens_BQ.shape
    num_groups = attn.cache.shape[2] // (2 * width)
    lens = context_lens_BQ.contiguous()
    bits = lens if attn.bits_BQ is None else attn.bits_BQ.contiguous()
    num_pairs = num_q * num_heads // num_groups
    block_m = min(64, max(16, triton.next_power_of_2(num_pairs)))
    num_blocks = triton.cdiv(num_pairs, block_m)
    max_splits = max(1, 2 * num_processors // (num_seqs * num_groups * num_blocks))
    num_parts = min(MAX_PARTS, 1 << (max_splits.bit_length() - 1))
    part = q_XHK.new_empty(num_rows, num_heads, num_parts, width, dtype=torch.float32)
    lse = q_XHK.new_empty(num_rows, num_heads, num_parts, dtype=torch.float32)
    _attend_groups[(num_blocks, num_seqs * num_groups, num_parts)](
        *(
            q_XHK,
            attn.cos,
            attn.sin,
            attn.cache,
            attn.page_table_BP,
            lens,
            bits,
            part,
            lse,
            attn.scale,
        ),
        *(*q_XHK.stride()[:2], attn.page_table_BP.stride(0), num_q),
        NUM_GROUPS=num_groups,
        NUM_EACH=num_heads // num_groups,
        K=width,
        PAGE_SIZE=attn.cache.shape[1],
        NUM_PARTS=num_parts,
        IS_INTERLEAVED=attn.is_interleaved,
        IS_TREE=attn.bits_BQ is not None,
        BLOCK_M=block_m,
        BLOCK_S=32,
        BLOCK_K=max(16, triton.next_power_of_2(width)),
        num_warps=8,
        num_stages=2,
    )
    return merged(part, lse, q_XHK.dtype)


@triton.jit
def _attend_groups(
    q,
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
    table_row,
    num_q,
    NUM_GROUPS: tl.constexpr,
    NUM_EACH: tl.constexpr,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_TREE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    seq = tl.program_id(1) // NUM_GROUPS
    group = tl.program_id(1) % NUM_GROUPS
    of = tl.program_id(2)
    pair_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_pair_M = pair_M < num_q * NUM_EACH
    head_M = group * NUM_EACH + pair_M % NUM_EACH
    row_M = seq * num_q + pair_M // NUM_EACH
    len_M = tl.load(lens + row_M, mask=is_pair_M, other=0)
    bits_M = tl.load(bits + row_M, mask=is_pair_M, other=0) if IS_TREE else len_M
    longest = tl.max(len_M, 0) + (64 if IS_TREE else 0)
    num_slots = tl.maximum(tl.cdiv(longest, NUM_PARTS), MIN_SLOTS)
    num_slots = tl.cdiv(num_slots, BLOCK_S) * BLOCK_S
    first = of * num_slots
    end = tl.minimum(first + num_slots, longest)

    k_K = tl.arange(0, BLOCK_K)
    is_k = (k_K < K)[None, :]
    is_m = is_pair_M[:, None]
    at_M = row_M * q_row + head_M * q_head
    q_MK = rotated(q, at_M, cos, sin, row_M, k_K, is_m & is_k, K, IS_INTERLEAVED)
    q_MK = q_MK.to(q.dtype.element_ty)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MK = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(first, end, BLOCK_S):
        slot_S = start + tl.arange(0, BLOCK_S)
        is_slot_S = slot_S < end
        if IS_TREE:  # some of the 64 slots that the tree bits address may have no page
            is_slot_S = is_slot_S & (slot_S < table_row * PAGE_SIZE)
        page_S = tl.load(table + seq * table_row + slot_S // PAGE_SIZE, mask=is_slot_S, other=0)
        at_S = (page_S * PAGE_SIZE + slot_S % PAGE_SIZE).to(tl.int64) * NUM_GROUPS * 2 + group
        at_SK = cache + at_S[:, None] * K + k_K[None, :]
        k_SK = tl.load(at_SK, mask=is_slot_S[:, None] & is_k, other=0.0)
        v_SK = tl.load(at_SK + NUM_GROUPS * K, mask=is_slot_S[:, None] & is_k, other=0.0)
        score_MS = tl.dot(q_MK, tl.trans(k_SK), input_precision="ieee")
        is_seen_MS = seen(slot_S, len_M, bits_M, IS_TREE) & is_slot_S[None, :]
        score_MS = tl.where(is_seen_MS, score_MS * (scale * LOG2_E), float("-inf"))
        score_MS, v_SK = only_seen(score_MS, v_SK, is_seen_MS)
        top_M, sum_M, out_MK = weighed(score_MS, v_SK, top_M, sum_M, out_MK)

    at_M = (row_M * (NUM_GROUPS * NUM_EACH) + head_M) * NUM_PARTS + of
    is_seen_M = sum_M != 0  # also true for NaN
    safe_M = tl.where(is_seen_M, sum_M, 1.0)
    lse_M = tl.where(is_seen_M, top_M + tl.log2(safe_M), float("-inf"))
    tl.store(lse + at_M, lse_M, mask=is_pair_M)
    where_MK = part + at_M.to(tl.int64)[:, None] * K + k_K[None, :]
    tl.store(where_MK, out_MK / safe_M[:, None], mask=is_m & is_k & is_seen_M[:, None])
