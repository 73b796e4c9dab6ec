"""MLA of packed prompts over expanded keys and values, by FlashAttention-2 (arXiv:2307.08691).

Keys are wider than values (192 and 128 in DeepSeek's models), and no mask is stored. A program
takes a head and a tile of rows of one segment. The rows are the last of their context, and each
sees all slots up to its own. Keys have two parts: one per head, expanded from the latents, and the
rotated part that all heads share.

Shape legend: T tokens, H heads, K query width, C latent width, R rotary width, L = C + R,
N = K - R, V value width, S slots of all contexts, M rows of a tile.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.checkpoint.tensors import upload
from tandem.model.kernels.base import AttentionMetadata
from tandem.model.kernels.gpu.attend import LOG2_E
from tandem.model.kernels.gpu.rotary import rotated
from tandem.model.kernels.gpu.softmax import only_seen, weighed
from tandem.model.network.batch import Segments, gather_pages

MAX_EXPANDED_BYTES = 1 << 30
"""Maximum bytes of keys and values that are expanded at once. It bounds the number of heads per
launch, because long contexts expand to gigabytes."""


def attend(
    q_THK: Tensor, kv_b: Tensor, attn: AttentionMetadata, segments: Segments, num_values: int
) -> Tensor:
    """Implement ``Kernels.mla_prefill``: [T, H, V]. ``kv_b`` is [H, N + V, C]."""
    latent_SL = gather_pages(attn.cache, attn.page_table_BP)[0]
    (num_rows, num_heads, width), num_pe = q_THK.shape, 2 * attn.cos.shape[1]
    is_exact = q_THK.dtype == torch.float32
    block_m = 16 if is_exact else 128
    lengths = segments.lengths
    page_size = attn.cache.shape[1]
    tiles = _tiles(
        lengths=lengths,
        contexts=segments.contexts,
        page_size=page_size,
        block_m=block_m,
        device=q_THK.device,
    )
    is_padded = sum(lengths) < num_rows
    make = q_THK.new_zeros if is_padded else q_THK.new_empty
    out_THV = make(num_rows, num_heads, num_values)
    per_head = latent_SL.shape[0] * kv_b.shape[1] * latent_SL.element_size()
    num_at_once = max(1, MAX_EXPANDED_BYTES // max(1, per_head))
    for first in range(0, num_heads if len(tiles) else 0, num_at_once):
        up_HUC = kv_b[first : first + num_at_once]
        kv_SU = latent_SL[:, : kv_b.shape[2]] @ up_HUC.flatten(0, 1).t()
        _attend[(len(tiles), len(up_HUC))](
            *(q_THK, kv_SU, latent_SL, attn.cos, attn.sin, tiles, out_THV, attn.scale, first),
            *(*q_THK.stride()[:2], kv_SU.stride(0), latent_SL.stride(0), num_heads),
            N=width - num_pe,
            R=num_pe,
            C=kv_b.shape[2],
            V=num_values,
            IS_INTERLEAVED=attn.is_interleaved,
            BLOCK_M=block_m,
            BLOCK_S=16 if is_exact else 64,
            BLOCK_N=_block(width - num_pe),
            BLOCK_R=_block(num_pe),
            BLOCK_V=_block(num_values),
            num_warps=4 if is_exact else 8,
            num_stages=1 if is_exact else 3,
        )
    return out_THV


@lru_cache(maxsize=2)
def _tiles(
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    page_size: int,
    block_m: int,
    device: torch.device,
) -> Tensor:
    """Return the tiles of a batch: [tiles, 4] int32, in descending order of work.

    The columns are first row, number of rows, first slot of the segment, and number of slots that
    the first row sees. Cached, because all layers of a pass use the same tiles.
    """
    tiles = []
    row = 0
    slot = 0
    for num, context in zip(lengths, contexts, strict=True):
        for done in range(0, num, block_m):
            tile = row + done, min(block_m, num - done), slot, context - num + done + 1
            tiles.append(tile)
        row = row + num
        slot = slot + -(-context // page_size) * page_size
    tiles.sort(key=lambda tile: -tile[3])
    return upload(torch.tensor(tiles, dtype=torch.int32), device)


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


@triton.jit
def _attend(
    q,
    kv,
    latent,
    cos,
    sin,
    tiles,
    out,
    scale,
    first_head,
    q_row,
    q_head,
    kv_row,
    latent_row,
    num_heads,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 4
    head = tl.program_id(1)
    m_M = tl.arange(0, BLOCK_M)
    v_V = tl.arange(0, BLOCK_V)
    row_M = (tl.load(tile) + m_M).to(tl.int64)
    is_row_M = m_M < tl.load(tile + 1)
    slot = tl.load(tile + 2).to(tl.int64)
    num_seen = tl.load(tile + 3)
    n_N = tl.arange(0, BLOCK_N)
    r_R = tl.arange(0, BLOCK_R)
    at_M = row_M * q_row + (first_head + head) * q_head
    is_q_MN = is_row_M[:, None] & (n_N < N)[None, :]
    q_MN = tl.load(q + at_M[:, None] + n_N[None, :], mask=is_q_MN, other=0.0)
    is_q_MR = is_row_M[:, None] & (r_R < R)[None, :]
    q_MR = rotated(q, at_M + N, cos, sin, row_M, r_R, is_q_MR, R, IS_INTERLEAVED).to(q_MN.dtype)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    keys = kv + slot * kv_row + head * (N + V), latent + slot * latent_row + C, kv_row, latent_row
    rows = q_MN, q_MR, num_seen + m_M, scale * LOG2_E
    state = top_M, sum_M, out_MV
    num_whole = num_seen // BLOCK_S * BLOCK_S
    end = num_seen + tl.load(tile + 1) - 1
    state = _over(keys, rows, state, 0, num_whole, end, False, N, R, V, BLOCK_S, BLOCK_N, BLOCK_R)
    state = _over(keys, rows, state, num_whole, end, end, True, N, R, V, BLOCK_S, BLOCK_N, BLOCK_R)
    _, sum_M, out_MV = state
    at_M = (row_M * num_heads + first_head + head) * V
    is_out_MV = is_row_M[:, None] & (v_V < V)[None, :]
    out_MV = (out_MV / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_M[:, None] + v_V[None, :], out_MV, mask=is_out_MV)


@triton.jit
def _over(
    keys,
    rows,
    state,
    first,
    last,
    end,
    IS_EDGE: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the softmax state after a range of slots. Without ``IS_EDGE`` every row sees all of
    them."""
    kv, latent, kv_row, latent_row = keys
    q_MN, q_MR, num_seen_M, scale = rows
    top_M, sum_M, out_MV = state
    n_N = tl.arange(0, BLOCK_N)
    r_R = tl.arange(0, BLOCK_R)
    v_V = tl.arange(0, out_MV.shape[1])
    for start in range(first, last, BLOCK_S):
        slot_S = start + tl.arange(0, BLOCK_S)
        is_slot_S1 = (slot_S < end)[:, None]
        at_S1 = slot_S.to(tl.int64)[:, None]
        is_k_SN = (n_N < N)[None, :]
        is_k_SR = (r_R < R)[None, :]
        is_v_SV = (v_V < V)[None, :]
        if IS_EDGE:
            is_k_SN = is_k_SN & is_slot_S1
            is_k_SR = is_k_SR & is_slot_S1
            is_v_SV = is_v_SV & is_slot_S1
        k_SN = tl.load(kv + at_S1 * kv_row + n_N[None, :], mask=is_k_SN, other=0.0)
        k_SR = tl.load(latent + at_S1 * latent_row + r_R[None, :], mask=is_k_SR, other=0.0)
        score_MS = tl.dot(q_MN, tl.trans(k_SN), input_precision="ieee")
        score_MS = tl.dot(q_MR, tl.trans(k_SR), score_MS, input_precision="ieee") * scale
        v_SV = tl.load(kv + at_S1 * kv_row + N + v_V[None, :], mask=is_v_SV, other=0.0)
        if IS_EDGE:
            is_seen_MS = slot_S[None, :] < num_seen_M[:, None]
            score_MS = tl.where(is_seen_MS, score_MS, float("-inf"))
            score_MS, v_SV = only_seen(score_MS, v_SV, is_seen_MS)
        top_M, sum_M, out_MV = weighed(score_MS, v_SV, top_M, sum_M, out_MV)
    return top_M, sum_M, out_MV
