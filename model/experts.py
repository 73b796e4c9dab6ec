"""The routed experts that a rank holds, fused (spec §4).

Shape legend: N tokens that are here, P (token, expert) pairs, S slots, D hidden, F width.
"""

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.base import Kernels
from model.layers import Part


class Experts(Part):
    """Slot i holds routed expert ``held[i]``; gate rows first, then up rows."""

    def __init__(self, config: ModelConfig, held: tuple[int, ...]) -> None:
        super().__init__()
        self.held = held
        num, dim, width = len(held), config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, dim), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num, dim, width), requires_grad=False)

    def adopt(self, kernels: Kernels) -> None:
        super().adopt(kernels)
        self._packed = kernels.pack_experts(self.gate_up_proj.data, self.down_proj.data)
        del self.gate_up_proj, self.down_proj

    def forward(self, x_ND: Tensor, tokens_P: Tensor | None, slots_P: Tensor) -> Tensor:
        """What slot ``slots_P[i]`` makes of token ``tokens_P[i]``: [P, D]; undefined where the slot
        is S, which means that it is not here. Without tokens each has as many pairs, in order."""
        return self.kernels.experts(x_ND, tokens_P, slots_P, *self._packed)
