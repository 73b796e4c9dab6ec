"""The routed experts that a rank holds, fused (spec §4).

Shape legend: N tokens that are here, P (token, expert) pairs, S slots, D hidden, F width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class Experts(nn.Module):
    """Slot i holds routed expert ``held[i]``; gate rows first, then up rows."""

    def __init__(self, config: ModelConfig, held: tuple[int, ...]) -> None:
        super().__init__()
        self.held = held
        num, dim, width = len(held), config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, dim), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num, dim, width), requires_grad=False)

    def forward(self, x_ND: Tensor, tokens_P: Tensor, slots_P: Tensor) -> Tensor:
        """What slot ``slots_P[i]`` makes of token ``tokens_P[i]``: [P, D]; undefined where the slot
        is S, which means that it is not here.

        Pairs are sorted by slot, one grouped product per projection. Shapes do not depend on the
        routing, and nothing waits for it.
        """
        num_slots = len(self.held)
        slot_of, order = slots_P.sort(stable=True)
        counts_S = slot_of.new_zeros(num_slots + 1)
        counts_S = counts_S.scatter_add(0, slot_of, torch.ones_like(slot_of))
        ends_S = counts_S[:-1].cumsum(0).int()
        hidden = _silu_mul(
            F.grouped_mm(x_ND[tokens_P[order]], self.gate_up_proj.transpose(1, 2), offs=ends_S)
        )
        out = F.grouped_mm(hidden, self.down_proj.transpose(1, 2), offs=ends_S)
        return torch.empty_like(out).index_copy(0, order, out)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
