"""Kernels for GPUs in Triton, with cuBLAS for unquantised products.

Tests compare them with the torch kernels (base.py).

Shape legend: see base.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.execution import CAPTURED
from tandem.model.kernels.base import AttentionMetadata, Fp8BlockWeight, Kernels, Routing
from tandem.model.kernels.captured import Captured
from tandem.model.kernels.gpu import compiling, gqa, norms, prefill, products, route, sample
from tandem.model.kernels.gpu.attend import attend
from tandem.model.kernels.gpu.experts import fused_experts, silu_mul
from tandem.model.kernels.gpu.moves import CachePointers
from tandem.model.kernels.replayable import Function, ReplayableFunction

MANY_PAIRS = 32
"""Minimum number of pairs per expert for which pairs are sorted and computed in tiles of rows."""


class TritonKernels(Kernels):
    """Kernels in Triton.

    Args:
        num_processors: Number of streaming multiprocessors of the device.
        quantises: Products with FP8 matrices quantise their inputs to FP8 too.
        power_of_2_scales: The scales of quantised inputs are powers of two.
    """

    name = "triton"
    exec_mode = CAPTURED
    owns_outputs = True
    supports_fp8_blocks = True
    reads_paged_cache = True
    write_mla_cache = staticmethod(norms.write_mla_cache)
    mla_prefill = staticmethod(prefill.attend)
    combine = staticmethod(norms.DeferredSum)
    compile_s = staticmethod(compiling.seconds)
    argmax_tokens = staticmethod(sample.argmax_tokens)
    sample_tokens = staticmethod(sample.draw)
    filtered_log_probs = staticmethod(sample.filtered_log_probs)

    def __init__(
        self, num_processors: int, quantises: bool = False, power_of_2_scales: bool = False
    ) -> None:
        self._num_processors = num_processors
        self._quantises = quantises
        self._power_of_2_scales = power_of_2_scales
        self._captures: tuple[torch.cuda.MemPool, torch.cuda.Stream] | None = None
        self._side_stream: torch.cuda.Stream | None = None
        self._addresses: CachePointers | None = None

    def make_replayable(self, function: Function) -> ReplayableFunction:
        if self._captures is None:
            # Keep a reference to the pool. Otherwise torch frees it with the last graph, while
            # tensors allocated from it are still in use.
            self._captures = torch.cuda.MemPool(), torch.cuda.Stream()
        return Captured(function, self._captures[0].id, self._captures[1])

    def run_concurrently(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture ``work`` as a parallel branch of the graph.

        Outside a capture the work runs in order, because launches from the host are the bottleneck.
        """
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return super().run_concurrently(work)
        main, side = torch.cuda.current_stream(), self._side_stream or torch.cuda.Stream()
        self._side_stream = side
        # The side stream reuses memory of earlier branches, whose readers are on the main stream.
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = work()

        def joined() -> Tensor:
            main.wait_stream(side)
            return result

        return joined

    def linear(self, x_XK: Tensor, packed: Any, num_out: int, in_fp32: bool = False) -> Tensor:
        if isinstance(packed, Fp8BlockWeight):
            dtype = torch.float32 if in_fp32 else x_XK.dtype
            return self._product(
                x_XK=x_XK,
                w=Fp8BlockWeight(*(part[None] for part in packed)),
                num_parts=1,
                dtype=dtype,
            )
        if in_fp32 and x_XK.dtype != torch.float32:
            return torch.mm(x_XK, packed.t(), out_dtype=torch.float32)
        return F.linear(x_XK, packed)

    def rms_norm(self, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x_XD=x_XD, branch=None, weight_D=weight_D, eps=eps)[1]

    def add_rms_norm(
        self, x_XD: Tensor, branch: Tensor | norms.DeferredSum, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norms.rms_norm(x_XD=x_XD, branch=branch, weight_D=weight_D, eps=eps)

    def mla_attend(
        self,
        q_XHK: Tensor,
        up_k: Tensor,
        up_v: Tensor,
        attn: AttentionMetadata,
        context_lens_BQ: Tensor,
    ) -> Tensor:
        num_nope, (num_rows, num_heads) = up_k.shape[2], q_XHK.shape[:2]
        nope_HXN = q_XHK[..., :num_nope].transpose(0, 1)
        pe_XHR = q_XHK[..., num_nope:]
        o_XHC = self._attend(
            nope_HXN=nope_HXN,
            up_HNC=up_k.transpose(1, 2),
            pe_XHR=pe_XHR,
            attn=attn,
            lens_BQ=context_lens_BQ,
        )
        out_XHV = q_XHK.new_empty(num_rows, num_heads, up_v.shape[1])
        torch.bmm(o_XHC.transpose(0, 1), up_v.transpose(1, 2), out=out_XHV.transpose(0, 1))
        return out_XHV

    def _attend(
        self,
        nope_HXN: Tensor,
        up_HNC: Tensor,
        pe_XHR: Tensor,
        attn: AttentionMetadata,
        lens_BQ: Tensor,
    ) -> Tensor:
        """Absorb the queries and attend: [X, H, C]."""
        q_XHC = torch.bmm(nope_HXN, up_HNC).transpose(0, 1)
        return attend(
            q_XHC=q_XHC,
            pe_XHR=pe_XHR,
            attn=attn,
            context_lens_BQ=lens_BQ,
            num_processors=self._num_processors,
        )

    def gqa_attend(self, q_XHK: Tensor, attn: AttentionMetadata, context_lens_BQ: Tensor) -> Tensor:
        return gqa.attend(
            q_XHK=q_XHK,
            attn=attn,
            context_lens_BQ=context_lens_BQ,
            num_processors=self._num_processors,
        )

    def copy_slots(self, caches: Sequence[Tensor], from_BN: Tensor, to_BN: Tensor) -> None:
        if self._addresses is None or not self._addresses.matches(caches):
            self._addresses = CachePointers(caches)
        self._addresses.copy_slots(caches, from_BN, to_BN)

    def fused_experts(
        self,
        x_ND: Tensor,
        tokens_P: Tensor | None,
        slots_P: Tensor | None,
        w1: Any,
        w2: Any,
        num_ranks: int = 1,
    ) -> Tensor:
        is_fp8 = isinstance(w1, Fp8BlockWeight)
        dtype = x_ND.dtype
        if slots_P is None and is_fp8:
            hidden = silu_mul(self._product(x_XK=x_ND, w=w1, num_parts=2, dtype=dtype))
            return self._product(x_XK=hidden, w=w2, num_parts=1, dtype=dtype)
        if slots_P is None:
            return F.linear(silu_mul(F.linear(x_ND, w1[0])), w2[0])
        if not len(slots_P):
            return x_ND.new_empty(0, x_ND.shape[1])
        inputs = x_ND, tokens_P, slots_P, w1, w2
        if is_fp8 and self._quantises:
            return products.fused_experts(
                *inputs, self._num_processors, num_ranks, self._power_of_2_scales
            )
        if not is_fp8 and len(slots_P) >= MANY_PAIRS * len(w1) * num_ranks:
            return products.fused_experts(*inputs, self._num_processors, num_ranks)
        return fused_experts(*inputs, num_ranks)

    def _product(
        self, x_XK: Tensor, w: Fp8BlockWeight, num_parts: int, dtype: torch.dtype
    ) -> Tensor:
        """Multiply by a single FP8 matrix: [X, M]."""
        x = products.quantise(x_XK, self._power_of_2_scales) if self._quantises else x_XK
        return products.product(
            x=x, w=w, dtype=dtype, num_processors=self._num_processors, num_halves=num_parts
        )

    def route(
        self, x_TD: Tensor, packed: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        if len(x_TD) <= route.FEW_TOKENS_MAX:
            return route.choose(route.logits(x_TD, packed), bias_E, routing)
        logits_TE = self.linear(x_TD, packed, len(packed), in_fp32=True)
        return route.choose(logits_TE[None], bias_E, routing)
