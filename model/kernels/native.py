"""Kernels for CPUs in C++ (cpu/): fp32 and bf16 weights, any processor with AVX2 or better.

A row's results are the same bits in every batch and with any number of threads.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from core.forms import RECORDED
from model.config import ModelConfig
from model.kernels.base import Kernels, Routing
from model.kernels.recorded import Recorded
from model.kernels.repeated import Function, Repeated

BLOCK = 16
"""Outputs that lie side by side in packed weights, as in cpu/vectors.h."""
OPS = [
    "linear",
    "rms_norm",
    "add_rms_norm",
    "mla_entry",
    "mla_attend",
    "mla_prefill",
    "experts",
    "combine",
]
"""Of cpu/native.cpp, called as they are."""


def fits(config: ModelConfig) -> bool:
    """Whether heads and latents are whole vectors."""
    widths = config.kv_lora_rank, config.v_head_dim, config.latent_dim
    return all(width % BLOCK == 0 for width in widths)


class Native(Kernels):
    """``library`` is cpu/, compiled."""

    name = "native"
    form = RECORDED
    reads_pages = True

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(library)
        for name in OPS:
            setattr(self, name, getattr(torch.ops.tandem, name).default)

    def repeated(self, function: Function) -> Repeated:
        return Recorded(function)

    def pack(self, weight: Tensor) -> Tensor:
        """[..., M, K] as [..., M / BLOCK, K, BLOCK], filled up with zeros."""
        filled = F.pad(weight, (0, 0, 0, -weight.shape[-2] % BLOCK))
        return filled.unflatten(-2, (-1, BLOCK)).transpose(-1, -2).contiguous()

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of gate and up rows take turns; their product is as wide as whole blocks."""
        gate, up = map(self.pack, gate_up.chunk(2, 1))
        down = F.pad(down, (0, -down.shape[2] % BLOCK))
        return torch.stack((gate, up), 2).flatten(1, 2), self.pack(down)

    def route(
        self, x_TD: Tensor, packed: Tensor, bias_E: Tensor | None, how: Routing
    ) -> tuple[Tensor, Tensor]:
        routed: tuple[Tensor, Tensor] = torch.ops.tandem.route.default(x_TD, packed, bias_E, *how)
        return routed
