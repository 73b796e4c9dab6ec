"""FP8 matrices in blocks, random or quantised, and their values."""

import torch
from torch import Tensor

from tandem.model.checkpoint.files import dequantise
from tandem.model.kernels.base import BLOCK, Fp8BlockWeight


def random_blocks(
    num_slots: int, num_parts: int, rows: int, columns: int, made: torch.Generator
) -> Fp8BlockWeight:
    """Return random blocks. Each of ``num_parts`` (gate and up, or one) has ``rows`` and its
    scales."""
    device = made.device
    shape = num_slots, num_parts * -(-rows // BLOCK), -(-columns // BLOCK)
    scales = torch.rand(shape, generator=made, device=device) * 0.1 + 0.01
    values = torch.empty(num_slots, num_parts * rows, columns, device=device, dtype=torch.bfloat16)
    for one in values:
        one.normal_(generator=made)
    return Fp8BlockWeight(values.to(torch.float8_e4m3fn), scales)


def dense(packed: Fp8BlockWeight, num_parts: int, slot: int) -> Tensor:
    """Return one expert's matrix in fp64, dequantised like by the loader."""
    values, scales = packed.values[slot].chunk(num_parts), packed.scales[slot].chunk(num_parts)
    parts = zip(values, scales, strict=True)
    return torch.cat([dequantise(*part, (BLOCK, BLOCK)) for part in parts]).double()


def quantise(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return values and scales of a matrix, as stored in a checkpoint (docs/concepts/model.md)."""
    rows, columns = (-(-size // block) for size in weight.shape)
    scale = torch.zeros(rows, columns)
    values = torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return values, scale
