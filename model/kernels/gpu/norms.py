"""RMS norms, with residual addition and the sum of expert outputs fused, and MLA cache writes.

Shape legend: X rows, D hidden, C latent width, R rotary width; T tokens, K experts of each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.kernels.base import AttentionMetadata
from tandem.model.kernels.gpu.rotary import rotated


class DeferredSum:
    """Arguments of ``Kernels.combine``, summed in the kernel of the next norm to save a launch.

    The inputs can be taken only once and are then released, because expert outputs are large.
    """

    def __init__(self, out_TKD: Tensor, weights_TK: Tensor, branch_TD: Tensor | None) -> None:
        self._inputs = [(out_TKD, weights_TK, branch_TD)]

    def take_inputs(self) -> Any:
        """Return the three arguments and release them."""
        return self._inputs.pop()


def rms_norm(
    x_XD: Tensor, branch: Tensor | DeferredSum | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``x_XD + branch`` and its norm. Rows of the inputs need not be contiguous."""
    num_rows, dim = x_XD.shape
    y_XD = torch.empty(num_rows, dim, dtype=x_XD.dtype, device=x_XD.device)
    sum_XD = x_XD if branch is None else torch.empty_like(y_XD)
    out, weights, branch_XD = (
        branch.take_inputs() if isinstance(branch, DeferredSum) else (x_XD, x_XD, branch)
    )
    num_parts = out.shape[1] if out.ndim == 3 else 0
    block = triton.next_power_of_2(dim)
    _rms_norm[(num_rows,)](
        *(
            x_XD,
            out,
            weights,
            x_XD if branch_XD is None else branch_XD,
            weight_D,
            sum_XD,
            y_XD,
            eps,
        ),
        *(x_XD.stride(0), 0 if branch_XD is None else branch_XD.stride(0)),
        D=dim,
        K=num_parts,
        HAS_BRANCH=branch_XD is not None,
        BLOCK_D=block,
        num_warps=8 if num_parts or block >= 4096 else 4,
    )
    return sum_XD, y_XD


def write_mla_cache(
    kv_XL: Tensor, weight_C: Tensor, eps: float, attn: AttentionMetadata, slots_X: Tensor
) -> None:
    """Implement ``Kernels.write_mla_cache``."""
    assert slots_X.is_contiguous(), "slots_X must be contiguous"
    width = len(weight_C)
    num_pe = kv_XL.shape[1] - width
    _entry[(len(kv_XL),)](
        *(kv_XL, weight_C, attn.cos, attn.sin, slots_X, attn.cache, eps, kv_XL.stride(0)),
        C=width,
        R=num_pe,
        IS_INTERLEAVED=attn.is_interleaved,
        BLOCK_C=triton.next_power_of_2(width),
        BLOCK_R=triton.next_power_of_2(num_pe),
    )


@triton.jit
def normed(x_D, weight_D, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Return the normalised row, cast before it is scaled (see ``Kernels.rms_norm``)."""
    scale = 1 / tl.sqrt(tl.sum(x_D * x_D, 0) / D + eps)
    return ((x_D * scale).to(dtype).to(tl.float32) * weight_D).to(dtype)


@triton.jit
def _rms_norm(
    x,
    out,
    weights,
    branch,
    weight,
    total,
    y,
    eps,
    x_row,
    branch_row,
    D: tl.constexpr,
    K: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_d = d < D
    x_D = tl.load(x + row * x_row + d, mask=is_d, other=0.0).to(tl.float32)
    if HAS_BRANCH or K > 0:
        branch_D = tl.zeros([BLOCK_D], tl.float32)
        for k in tl.static_range(K):
            out_D = tl.load(out + (row * K + k) * D + d, mask=is_d, other=0.0).to(tl.float32)
            branch_D += out_D * tl.load(weights + row * K + k)
        branch_D = branch_D.to(y.dtype.element_ty).to(tl.float32)
        if HAS_BRANCH:
            branch_D += tl.load(branch + row * branch_row + d, mask=is_d, other=0.0).to(tl.float32)
        x_D += branch_D.to(y.dtype.element_ty).to(tl.float32)
        x_D = x_D.to(y.dtype.element_ty)
        tl.store(total + row * D + d, x_D, mask=is_d)
        x_D = x_D.to(tl.float32)
    weight_D = tl.load(weight + d, mask=is_d, other=0.0).to(tl.float32)
    tl.store(y + row * D + d, normed(x_D, weight_D, eps, D, y.dtype.element_ty), mask=is_d)


@triton.jit
def _entry(
    kv,
    weight,
    cos,
    sin,
    slots,
    cache,
    eps,
    kv_row,
    C: tl.constexpr,
    R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    at = cache + tl.load(slots + row) * (C + R)
    x_C = tl.load(kv + row * kv_row + c, mask=c < C, other=0.0).to(tl.float32)
    weight_C = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(at + c, normed(x_C, weight_C, eps, C, cache.dtype.element_ty), mask=c < C)
    index = row + tl.zeros([1], tl.int64)
    is_r = (r < R)[None, :]
    pe = rotated(kv, index * kv_row + C, cos, sin, index, r, is_r, R, IS_INTERLEAVED)
    tl.store(at + C + r[None, :], pe.to(cache.dtype.element_ty), mask=is_r)
