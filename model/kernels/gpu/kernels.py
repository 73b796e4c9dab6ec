"""Kernels for GPUs in Triton, beside cuBLAS for plain products; they are the same functions as
torch's (base.py), which their tests compare them with.

Shape legend: see base.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.base import Blocks, Function, Kernels, Repeated, Routing
from model.kernels.captured import Captured
from model.kernels.gpu import norms, route, sample
from model.kernels.gpu.attend import attend
from model.kernels.gpu.experts import combine, experts, silu_mul

MANY_PAIRS = 32
"""From so many pairs an expert on, a grouped product is bound by arithmetic, which CUTLASS does
better."""


class Triton(Kernels):
    """``num_processors`` of the device are to be busy."""

    name = "triton"
    form = "captured"
    makes_ahead = True
    reads_blocks = True
    reads_pages = True
    mla_entry = staticmethod(norms.mla_entry)
    combine = staticmethod(combine)
    drawn = staticmethod(sample.draw)

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._pool: Any = None

    def repeated(self, function: Function) -> Repeated:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return Captured(function, self._pool)

    def linear(self, x_XK: Tensor, packed: Tensor, num_out: int, in_fp32: bool = False) -> Tensor:
        if in_fp32 and x_XK.dtype != torch.float32:
            return torch.mm(x_XK, packed.t(), out_dtype=torch.float32)
        return F.linear(x_XK, packed)

    def rms_norm(self, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x_XD, None, weight_D, eps)[1]

    def add_rms_norm(
        self, x_XD: Tensor, more_XD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norms.rms_norm(x_XD, more_XD, weight_D, eps)

    def mla_attend(
        self,
        q_XHK: Tensor,
        up_k: Tensor,
        up_v: Tensor,
        cos: Tensor,
        sin: Tensor,
        is_interleaved: bool,
        cache: Tensor,
        page_table_BP: Tensor,
        context_lens_BQ: Tensor,
        scale: float,
    ) -> Tensor:
        num_nope, (num_rows, num_heads) = up_k.shape[2], q_XHK.shape[:2]
        q_HXC = torch.bmm(q_XHK[..., :num_nope].transpose(0, 1), up_k.transpose(1, 2))
        o_XHC = attend(
            q_HXC.transpose(0, 1),
            q_XHK[..., num_nope:],
            cos,
            sin,
            is_interleaved,
            cache,
            page_table_BP,
            context_lens_BQ,
            scale,
            self._num_processors,
        )
        out_XHV = q_XHK.new_empty(num_rows, num_heads, up_v.shape[1])
        up_v_HCV = up_v.transpose(1, 2)
        torch.bmm(o_XHC.transpose(0, 1), up_v_HCV, out=out_XHV.transpose(0, 1))
        return out_XHV

    def experts(
        self, x_ND: Tensor, tokens_P: Tensor | None, slots_P: Tensor | None, w1: Any, w2: Any
    ) -> Tensor:
        if slots_P is None:
            return F.linear(silu_mul(F.linear(x_ND, w1[0])), w2[0])
        can_group = x_ND.dtype == torch.bfloat16 and not isinstance(w1, Blocks)
        if can_group and len(slots_P) >= MANY_PAIRS * len(w1):
            return super().experts(x_ND, tokens_P, slots_P, w1, w2)
        if not len(slots_P):
            return x_ND.new_empty(0, x_ND.shape[1])
        return experts(x_ND, tokens_P, slots_P, w1, w2)

    def route(
        self, x_TD: Tensor, packed: Tensor, bias_E: Tensor | None, how: Routing
    ) -> tuple[Tensor, Tensor]:
        logits_TE = self.linear(x_TD, packed, len(packed), in_fp32=True)
        return route.choose(logits_TE, bias_E, how)
