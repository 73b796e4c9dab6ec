"""Kernels for CPUs in C++ (cpu/), for fp32 and bf16 weights, on processors with AVX2 or better.

The results of a row are bitwise identical in every batch and with any number of threads.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.execution import RECORDED
from tandem.model.checkpoint.tensors import list_tensors
from tandem.model.kernels.base import AttentionMetadata, Kernels, Routing
from tandem.model.kernels.recorded import Recorded
from tandem.model.kernels.replayable import Function, ReplayableFunction
from tandem.model.network.batch import Segments
from tandem.model.sampling.adjust import AdjustRows
from tandem.model.sampling.sampler import SamplingRows

LANES = 16
"""Number of outputs that are interleaved in packed weights; equals kBlock of cpu/vectors.h."""


def _op(name: str) -> Any:
    """Return a property for an operator of cpu/native.cpp, resolved after the library is loaded."""
    return property(lambda self: getattr(torch.ops.tandem, name).default)


class NativeKernels(Kernels):
    """Kernels of the compiled ``library`` (build.py)."""

    name = "native"
    exec_mode, dim_multiple = RECORDED, LANES
    reads_paged_cache = True
    linear = _op("linear")
    rms_norm = _op("rms_norm")
    add_rms_norm = _op("add_rms_norm")
    fused_experts = _op("experts")
    combine = _op("combine")
    pack = _op("pack")
    argmax_tokens = _op("likeliest")
    are_finite = _op("are_finite")
    ngram_lookup = _op("lookup")
    copy_slots = _op("move")
    copy_rows = _op("copy_rows")

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(library)

    def use_threads(self, num_threads: int) -> None:
        """Set the thread count of these kernels. Torch gets one thread.

        Its remaining operators are small, and its threads would take cores from the kernels.
        """
        torch.ops.tandem.use_threads.default(num_threads)
        torch.set_num_threads(1)

    def make_replayable(self, function: Function) -> ReplayableFunction:
        return Recorded(function)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Interleave blocks of LANES gate and up rows, and pad F to a multiple of LANES."""
        gate, up = map(self.pack, gate_up.chunk(2, 1))
        down = F.pad(down, (0, -down.shape[2] % LANES))
        return torch.stack((gate, up), 2).flatten(1, 2), torch.ops.tandem.by_lanes.default(down)

    def write_mla_cache(
        self, kv_XL: Tensor, weight_C: Tensor, eps: float, attn: AttentionMetadata, slots_X: Tensor
    ) -> None:
        torch.ops.tandem.write_mla_cache.default(
            kv_XL, weight_C, eps, *attn[:3], slots_X, attn.cache
        )

    def mla_attend(
        self,
        q_XHK: Tensor,
        up_k: Tensor,
        up_v: Tensor,
        attn: AttentionMetadata,
        context_lens_BQ: Tensor,
    ) -> Tensor:
        rest = *attn[:5], context_lens_BQ, attn.scale, attn.bits_BQ
        return torch.ops.tandem.mla_attend.default(q_XHK, up_k, up_v, *rest)

    def write_gqa_cache(self, kv_XL: Tensor, attn: AttentionMetadata, slots_X: Tensor) -> None:
        torch.ops.tandem.write_gqa_cache.default(kv_XL, *attn[:3], slots_X, attn.cache)

    def gqa_attend(self, q_XHK: Tensor, attn: AttentionMetadata, context_lens_BQ: Tensor) -> Tensor:
        if q_XHK.shape[2] % LANES:
            return super().gqa_attend(q_XHK, attn, context_lens_BQ)
        rest = *attn[:5], context_lens_BQ, attn.scale, attn.bits_BQ
        return torch.ops.tandem.gqa_attend.default(q_XHK, *rest)

    @staticmethod
    def adjust(
        logits_BV: Tensor,
        rules: AdjustRows,
        num_output_B: Tensor,
        drafts_BN: Tensor,
        seen_BN: Tensor | None = None,
    ) -> Tensor:
        return torch.ops.tandem.adjust.default(
            logits_BV, list_tensors(rules), num_output_B, drafts_BN, seen_BN
        )

    def sample_tokens(
        self, adjusted_BQV: Tensor, rows: SamplingRows, output_index_BQ: Tensor
    ) -> Tensor:
        settings = *_settings(rows), rows.seed_B, output_index_BQ
        return torch.ops.tandem.draw.default(adjusted_BQV, *settings)

    def filtered_log_probs(self, logits_BQV: Tensor, rows: SamplingRows) -> Tensor:
        return torch.ops.tandem.filtered.default(logits_BQV, *_settings(rows))

    def mla_prefill(
        self,
        q_THK: Tensor,
        kv_b: Tensor,
        attn: AttentionMetadata,
        segments: Segments,
        num_values: int,
    ) -> Tensor:
        rest = *attn[:5], segments.lengths, segments.contexts, num_values, attn.scale
        return torch.ops.tandem.mla_prefill.default(q_THK, kv_b, *rest)

    def route(
        self, x_TD: Tensor, packed: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.tandem.route.default(x_TD, packed, bias_E, *routing)


def _settings(rows: SamplingRows) -> tuple[Tensor, ...]:
    return rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B
