"""Norms, rotary embedding and the gated MLP (spec §3).

Shape legend: D hidden, F MLP width, R rotary width of a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig, YarnScaling


class RMSNorm(nn.Module):
    """Normalised in fp32, cast to the input's dtype, then scaled (spec §3, HF order)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), x [..., D]; padding is computed like the rest."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(dim, width)
        self.up_proj = linear(dim, width)
        self.down_proj = linear(width, dim)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def linear(dim_in: int, dim_out: int) -> nn.Linear:
    layer = nn.Linear(dim_in, dim_out, bias=False)
    return layer.requires_grad_(False)


def yarn_inv_freq(inv_freq: Tensor, theta: float, dim: int, yarn: YarnScaling) -> Tensor:
    """Frequencies [dim / 2] stretched by ``yarn.factor`` below the ramp (spec §3, YaRN)."""

    def correction(num_rotations: float) -> float:
        span = yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high: float = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / yarn.factor * ramp


class Rope(nn.Module):
    """Rotary embedding of interleaved pairs (2j, 2j+1), written back interleaved.

    ``rope_interleave`` False pairs (j, j + R/2) instead; the output layout is the same, so
    q.k is unchanged and the cached layout is one (spec §3: it is part of the wire format).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.interleaved = config.rope_interleave
        cos, sin = rope_tables(config)
        self.cos_TR: Tensor
        self.sin_TR: Tensor
        self.register_buffer("cos_TR", cos, persistent=False)
        self.register_buffer("sin_TR", sin, persistent=False)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., R/2]; positions are clamped at the table's end."""
        clamped = positions.clamp(max=self.cos_TR.shape[0] - 1)
        return self.cos_TR[clamped], self.sin_TR[clamped]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [..., R] by angles whose cos and sin broadcast to [..., R/2]."""
        pairs = x.float().unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        dim = -1 if self.interleaved else -2
        a, b = pairs.unbind(dim)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position_embeddings, R/2] in fp32, built on the CPU."""
    dim = config.qk_rope_head_dim
    with torch.device("cpu"):
        inv_freq = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        scale = 1.0
        if config.yarn is not None:
            inv_freq = yarn_inv_freq(inv_freq, config.rope_theta, dim, config.yarn)
            scale = config.yarn.cos_sin_factor
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = positions[:, None] * inv_freq[None, :]
    return angles.cos() * scale, angles.sin() * scale
