"""Norms, linear layers, the gated MLP and rotary embedding.

Shape legend: X rows, D hidden, R rotary width of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.checkpoint.config import ModelConfig, YarnScaling
from tandem.model.checkpoint.files import dequantise
from tandem.model.kernels.base import (
    BLOCK,
    BranchOutput,
    Fp8BlockWeight,
    Kernels,
    RopeCosSin,
    Weights,
)


class KernelModule(nn.Module):
    """Module that computes with ``kernels``, set by ``process_weights_after_loading``."""

    kernels: Kernels

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        """Keep ``kernels`` and pack the loaded weights for them."""
        self.kernels = kernels


def process_weights_after_loading(module: nn.Module, kernels: Kernels) -> None:
    """Process the weights of ``module`` and its descendants, parents first.

    A parent may merge the weights of its children and delete these children.
    """
    if isinstance(module, KernelModule):
        module.process_weights_after_loading(kernels)
    for child in list(module.children()):
        process_weights_after_loading(child, kernels)


class RMSNorm(KernelModule):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, branch: BranchOutput | None) -> tuple[Tensor, Tensor]:
        """Return ``x + branch`` and the norm of this sum. Without ``branch`` the sum is ``x``."""
        if branch is None:
            return x, self(x)
        return self.kernels.add_rms_norm(x, branch, self.weight, self.eps)


class Matrices(KernelModule):
    """Weights [..., M, K] in the format of the checkpoint.

    Each matrix consists of ``num_parts`` matrices of the checkpoint, concatenated along M.
    """

    def __init__(self, *shape: int, num_parts: int = 1) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

    def keep_fp8(self) -> None:
        """Load the weights as FP8 with block scales. Must be called before loading."""
        fp8 = self.weight.to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(fp8, requires_grad=False)
        *num, rows, columns = fp8.shape
        num_blocks = self.num_parts * -(-rows // self.num_parts // BLOCK), -(-columns // BLOCK)
        self.register_buffer("weight_scale_inv", torch.empty(*num, *num_blocks, device=fp8.device))

    @property
    def loaded_weights(self) -> Weights:
        """The weights before packing, with scales if they are FP8."""
        if self.weight.dtype != torch.float8_e4m3fn:
            return self.weight.data
        return Fp8BlockWeight(self.weight.data, self.get_buffer("weight_scale_inv"))


class Linear(Matrices):
    """Linear layer without bias, with a weight [dim_out, dim_in].

    Attributes:
        packed: The weight in the format of the kernels.
        may_keep_fp8: Whether the weight may stay FP8 if the kernels support that.
    """

    def __init__(self, dim_in: int, dim_out: int, may_keep_fp8: bool = True) -> None:
        super().__init__(dim_out, dim_in)
        self.num_out = dim_out
        self.may_keep_fp8 = may_keep_fp8

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        super().process_weights_after_loading(kernels)
        self.packed = kernels.pack(self.loaded_weights)
        del self.weight

    def forward(self, x: Tensor, in_fp32: bool = False) -> Tensor:
        return self.kernels.linear(x, self.packed, self.num_out, in_fp32)


def same_format(*weights: Weights) -> list[Any]:
    """Return all weights in one format: FP8 blocks are dequantised unless all weights are FP8."""
    plain = next((weight for weight in weights if isinstance(weight, Tensor)), None)
    if plain is None:
        return list(weights)
    return [
        dequantise(*weight, (BLOCK, BLOCK)).to(plain.dtype)
        if isinstance(weight, Fp8BlockWeight)
        else weight
        for weight in weights
    ]


def concat_rows(first: Any, second: Any) -> Weights:
    """Concatenate two weights of the same format along their rows."""
    if isinstance(first, Tensor):
        return torch.cat((first, second))
    return Fp8BlockWeight(*map(torch.cat, zip(first, second, strict=True)))


def as_single_expert(weights: Weights) -> Weights:
    """Add a leading expert axis of size 1 to a dense weight."""
    return (
        weights[None]
        if isinstance(weights, Tensor)
        else Fp8BlockWeight(*(x[None] for x in weights))
    )


class GatedMLP(KernelModule):
    """Gated MLP, down(silu(gate(x)) * up(x)), of x [X, D]. Padding rows are computed too."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, width)
        self.up_proj = Linear(dim, width)
        self.down_proj = Linear(width, dim)

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        super().process_weights_after_loading(kernels)
        gate, up, down = same_format(
            *(p.loaded_weights for p in (self.gate_proj, self.up_proj, self.down_proj))
        )
        self.packed = kernels.pack_experts(
            as_single_expert(concat_rows(gate, up)), as_single_expert(down)
        )
        del self.gate_proj, self.up_proj, self.down_proj

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return self.kernels.fused_experts(x, None, None, *self.packed)


def yarn_inv_freq(inv_freq: Tensor, theta: float, dim: int, yarn: YarnScaling) -> Tensor:
    """Scale RoPE frequencies [dim / 2] by YaRN (arXiv:2309.00071).

    Low frequencies are divided by ``yarn.factor``, high ones kept, and those between interpolated.
    """

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
    """RoPE tables: fp32 cos and sin [max_position_embeddings, R / 2], computed on the CPU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.qk_rope_head_dim
        theta = config.rope_theta
        yarn = config.yarn
        scale = 1.0
        with torch.device("cpu"):
            inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            if yarn is not None:
                inv_freq = yarn_inv_freq(inv_freq=inv_freq, theta=theta, dim=dim, yarn=yarn)
                scale = yarn.cos_sin_factor
            positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
            angles = positions[:, None] * inv_freq[None, :]
        self.cos_TR: Tensor
        self.sin_TR: Tensor
        self.register_buffer("cos_TR", angles.cos() * scale, persistent=False)
        self.register_buffer("sin_TR", angles.sin() * scale, persistent=False)

    def at(self, positions_X: Tensor) -> RopeCosSin:
        """Return the angles of ``positions_X``, which are clamped to the end of the tables."""
        clamped_X = positions_X.clamp(max=self.cos_TR.shape[0] - 1)
        return self.cos_TR[clamped_X], self.sin_TR[clamped_X]
