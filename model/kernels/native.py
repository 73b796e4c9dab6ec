"""Kernels for CPUs in C++ (cpu/): fp32 and bf16 weights, any processor with AVX2 or better.

A row's results are the same bits in every batch and with any number of threads.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.forms import RECORDED
from tandem.model.checkpoint.tensors import tensors
from tandem.model.kernels.base import Attention, Kernels, Routing
from tandem.model.kernels.recorded import Recorded
from tandem.model.kernels.repeated import Function, Repeated
from tandem.model.network.batch import Segments
from tandem.model.sampling.adjust import AdjustRows
from tandem.model.sampling.sampler import SamplingRows

LANES = 16
"""Outputs that lie side by side in packed weights, as in cpu/vectors.h."""


def _op(name: str) -> Any:
    """Of cpu/native.cpp, called as it is; it is there once that is loaded."""
    return property(lambda self: getattr(torch.ops.tandem, name).default)


class Native(Kernels):
    """``library`` is cpu/, compiled."""

    name = "native"
    form, lanes = RECORDED, LANES
    reads_pages = True
    linear = _op("linear")
    rms_norm = _op("rms_norm")
    add_rms_norm = _op("add_rms_norm")
    experts = _op("experts")
    combine = _op("combine")
    pack = _op("pack")
    likeliest = _op("likeliest")
    are_finite = _op("are_finite")
    lookup = _op("lookup")
    move = _op("move")
    copy_rows = _op("copy_rows")

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(library)

    def use_threads(self, num_threads: int) -> None:
        """Those of torch's own operators, which are small, would only keep cores from these."""
        torch.ops.tandem.use_threads.default(num_threads)
        torch.set_num_threads(1)

    def repeated(self, function: Function) -> Repeated:
        return Recorded(function)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of gate and up rows take turns; their product is as wide as whole blocks."""
        gate, up = map(self.pack, gate_up.chunk(2, 1))
        down = F.pad(down, (0, -down.shape[2] % LANES))
        return torch.stack((gate, up), 2).flatten(1, 2), torch.ops.tandem.by_lanes.default(down)

    def mla_entry(
        self, kv_XL: Tensor, weight_C: Tensor, eps: float, how: Attention, slots_X: Tensor
    ) -> None:
        torch.ops.tandem.mla_entry.default(kv_XL, weight_C, eps, *how[:3], slots_X, how.cache)

    def mla_attend(
        self, q_XHK: Tensor, up_k: Tensor, up_v: Tensor, how: Attention, context_lens_BQ: Tensor
    ) -> Tensor:
        rest = *how[:5], context_lens_BQ, how.scale, how.bits_BQ
        return torch.ops.tandem.mla_attend.default(q_XHK, up_k, up_v, *rest)

    def gqa_entry(self, kv_XL: Tensor, how: Attention, slots_X: Tensor) -> None:
        torch.ops.tandem.gqa_entry.default(kv_XL, *how[:3], slots_X, how.cache)

    def gqa_attend(self, q_XHK: Tensor, how: Attention, context_lens_BQ: Tensor) -> Tensor:
        if q_XHK.shape[2] % LANES:
            return super().gqa_attend(q_XHK, how, context_lens_BQ)
        rest = *how[:5], context_lens_BQ, how.scale, how.bits_BQ
        return torch.ops.tandem.gqa_attend.default(q_XHK, *rest)

    @staticmethod
    def adjust(logits_BV: Tensor, rules: AdjustRows, *told: Tensor) -> Tensor:
        return torch.ops.tandem.adjust.default(logits_BV, tensors(rules), *told)

    def drawn(self, adjusted_BQV: Tensor, rows: SamplingRows, output_index_BQ: Tensor) -> Tensor:
        given = *_settings(rows), rows.seed_B, output_index_BQ
        return torch.ops.tandem.draw.default(adjusted_BQV, *given)

    def filtered_log_probs(self, logits_BQV: Tensor, rows: SamplingRows) -> Tensor:
        return torch.ops.tandem.filtered.default(logits_BQV, *_settings(rows))

    def mla_prefill(
        self, q_THK: Tensor, kv_b: Tensor, how: Attention, segments: Segments, num_values: int
    ) -> Tensor:
        rest = *how[:5], segments.lengths, segments.contexts, num_values, how.scale
        return torch.ops.tandem.mla_prefill.default(q_THK, kv_b, *rest)

    def route(
        self, x_TD: Tensor, packed: Tensor, bias_E: Tensor | None, how: Routing
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.tandem.route.default(x_TD, packed, bias_E, *how)


def _settings(rows: SamplingRows) -> tuple[Tensor, ...]:
    return rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B
