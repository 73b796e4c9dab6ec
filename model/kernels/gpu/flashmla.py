"""MLA of decode steps by FlashMLA (github.com/deepseek-ai/FlashMLA), for 64 or more (head, row)
pairs per sequence.

The operator comes from the wheel of sglang-kernel (the extra ``gpu``). At this size, one program of
the Triton kernel (attend.py) fills a processor, and its loads, softmax and products do not overlap.

Shape legend: B sequences, Q query rows of each, X = B * Q, H heads, N width of what is absorbed, C
latent width, R rotary width, L = C + R, P pages of a table.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import AttentionMetadata
from tandem.model.kernels.gpu.rotary import rotated

SCHEMA = (
    "sgl_kernel::dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, "
    "Tensor block_table, float softmax_scale, bool is_causal, Tensor? tile_scheduler_metadata, "
    "Tensor? num_splits) -> (Tensor, Tensor, Tensor?, Tensor?)"
)
MIN_FLASHMLA_PAIRS = 64
PAGE_SIZE = 64
LATENT = 512
ENTRY = 576
STEP = tl.constexpr(ENTRY)


class FlashMla:
    """Attention by FlashMLA. ``operator`` is the function of SCHEMA.

    FlashMLA computes how to split the contexts over the device from their lengths. The first layer
    of a forward pass does so, and the other layers reuse the result.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._pass: tuple[Any, ...] = None, None

    @staticmethod
    def fits(num_heads: int, attn: AttentionMetadata, lens_BQ: Tensor) -> bool:
        """Return whether FlashMLA supports these inputs and has enough pairs to pay off.

        Rows of a sequence must be a chain: each sees one slot more than the previous row.
        """
        is_many = num_heads * lens_BQ.shape[1] >= MIN_FLASHMLA_PAIRS
        is_even = num_heads == triton.next_power_of_2(num_heads) and attn.bits_BQ is None
        is_entry = attn.cache.shape[1:] == (PAGE_SIZE, ENTRY) and attn.cache.element_size() == 2
        return is_many and is_even and is_entry

    def attend(
        self,
        nope_HXN: Tensor,
        up_HNC: Tensor,
        pe_XHR: Tensor,
        attn: AttentionMetadata,
        lens_BQ: Tensor,
    ) -> Tensor:
        """Absorb the queries and attend, as a part of ``Kernels.mla_attend``: [X, H, C]."""
        num_rows, num_heads, num_pe = pe_XHR.shape
        q_XHL = pe_XHR.new_empty(num_rows, num_heads, ENTRY)
        torch.bmm(nope_HXN, up_HNC, out=q_XHL[..., :LATENT].transpose(0, 1))
        where = q_XHL[..., LATENT:], *pe_XHR.stride()[:2], num_heads, num_pe
        _rotate[(num_rows,)](pe_XHR, attn.cos, attn.sin, *where, attn.is_interleaved)
        if self._pass[0] is not lens_BQ or self._pass[1] is not attn.page_table_BP:
            table_BP = attn.page_table_BP.int()
            lens_B = lens_BQ[:, -1].clamp(max=table_BP.shape[1] * PAGE_SIZE).int()
            self._pass = lens_BQ, attn.page_table_BP, lens_B, table_BP, (None, None)
        *metadata, split = self._pass
        arguments = attn.cache.unsqueeze(2), LATENT, *metadata[2:], attn.scale, lens_BQ.shape[1] > 1
        out_BQHC, _, *split = self._operator(q_XHL.unflatten(0, lens_BQ.shape), *arguments, *split)
        self._pass = *metadata, split
        return out_BQHC.flatten(0, 1)


def operator() -> Any:
    """Load the operator of SCHEMA.

    Raises:
        ImportError: The extra ``gpu`` is not installed.
        ValueError: The operator has another schema.
        OSError: The library is incompatible with this torch.
    """
    spec = find_spec("sgl_kernel")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang-kernel is not installed; run pip install 'tandem-serve[gpu]'")
    torch.ops.load_library(Path(spec.submodule_search_locations[0]) / "flashmla_ops.abi3.so")
    found = torch.ops.sgl_kernel.dense_decode_fwd.default
    if str(found._schema) != SCHEMA:
        raise ValueError(f"FlashMLA has schema {found._schema}, expected {SCHEMA}")
    return found


@triton.jit
def _rotate(
    pe, cos, sin, q, pe_row, pe_head, H: tl.constexpr, R: tl.constexpr, IS_INTERLEAVED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    h_H = tl.arange(0, H)
    r_R = tl.arange(0, R)
    is_HR = (h_H < H)[:, None] & (r_R < R)[None, :]
    at_H = row * pe_row + h_H * pe_head
    row_H = row + h_H * 0
    pe_HR = rotated(pe, at_H, cos, sin, row_H, r_R, is_HR, R, IS_INTERLEAVED)
    tl.store(q + (row * H + h_H)[:, None] * STEP + r_R[None, :], pe_HR.to(q.dtype.element_ty))
