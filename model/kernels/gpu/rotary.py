"""Rotary embedding as a part of other kernels. Outputs are interleaved (``rotate`` in base.py)."""

import triton
import triton.language as tl


@triton.jit
def rotated(x, at_M, cos, sin, row_M, r_R, mask_MR, R: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Load values [M, R] at ``x + at_M`` and rotate them by the angles of ``row_M``, in fp32."""
    j_R = r_R // 2
    first_R = 2 * j_R if IS_INTERLEAVED else j_R
    second_R = 2 * j_R + 1 if IS_INTERLEAVED else j_R + R // 2
    a_MR = tl.load(x + at_M[:, None] + first_R[None, :], mask=mask_MR, other=0.0).to(tl.float32)
    b_MR = tl.load(x + at_M[:, None] + second_R[None, :], mask=mask_MR, other=0.0).to(tl.float32)
    at_MR = row_M[:, None] * (R // 2) + j_R[None, :]
    cos_MR = tl.load(cos + at_MR, mask=mask_MR, other=0.0)
    sin_MR = tl.load(sin + at_MR, mask=mask_MR, other=0.0)
    is_even_R = (r_R % 2 == 0)[None, :]
    return tl.where(is_even_R, a_MR * cos_MR - b_MR * sin_MR, a_MR * sin_MR + b_MR * cos_MR)
