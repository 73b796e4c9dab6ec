"""The routed experts that a rank holds, fused (spec §4).

Shape legend: N tokens that are here, P (token, expert) pairs, S slots, D hidden, F width.
"""

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.base import BLOCK, Blocks, Kernels
from model.layers import Part


class Experts(Part):
    """Slot i holds routed expert ``held[i]``; gate rows first, then up rows."""

    def __init__(self, config: ModelConfig, held: tuple[int, ...]) -> None:
        super().__init__()
        self.held = held
        num, dim, width = len(held), config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, dim), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num, dim, width), requires_grad=False)

    def keep_blocks(self) -> None:
        """Before they are loaded: weights stay FP8, with a factor for each block (spec §6)."""
        num, double_width, dim = self.gate_up_proj.shape
        blocks, across = [-(-size // BLOCK) for size in (double_width // 2, dim)]
        for name in ("gate_up_proj", "down_proj"):
            fp8 = getattr(self, name).to(torch.float8_e4m3fn)
            setattr(self, name, nn.Parameter(fp8, requires_grad=False))
        device = self.gate_up_proj.device
        self.register_buffer("gate_up_scale", torch.empty(num, 2 * blocks, across, device=device))
        self.register_buffer("down_scale", torch.empty(num, across, blocks, device=device))

    def adopt(self, kernels: Kernels) -> None:
        super().adopt(kernels)
        weights = self.gate_up_proj.data, self.down_proj.data
        if self.gate_up_proj.dtype == torch.float8_e4m3fn:
            scales = self.get_buffer("gate_up_scale"), self.get_buffer("down_scale")
            self._packed = kernels.pack_experts(*map(Blocks, weights, scales))
            del self.gate_up_scale, self.down_scale
        else:
            self._packed = kernels.pack_experts(*weights)
        del self.gate_up_proj, self.down_proj

    def forward(
        self, x_ND: Tensor, tokens_P: Tensor | None, slots_P: Tensor, num_ranks: int = 1
    ) -> Tensor:
        """What slot ``slots_P[i]`` makes of token ``tokens_P[i]``: [P, D]; undefined where the slot
        is S, which means that it is not here. Without tokens each has as many pairs, in order.
        Those that are not here are among them if they are the pairs of ``num_ranks``."""
        return self.kernels.experts(x_ND, tokens_P, slots_P, *self._packed, num_ranks)
