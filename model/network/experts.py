"""The routed experts that a rank holds, fused (spec §4).

Shape legend: N tokens that are here, P (token, expert) pairs, S slots, D hidden, F width.
"""

from torch import Tensor

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import Kernels
from tandem.model.network.layers import KernelModule, Matrices


class Experts(KernelModule):
    """Slot i holds routed expert ``expert_ids[i]``; gate rows first, then up rows."""

    def __init__(self, config: ModelConfig, expert_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.expert_ids = expert_ids
        num, dim, width = len(expert_ids), config.hidden_size, config.moe_intermediate_size
        self.gate_up = Matrices(num, 2 * width, dim, num_parts=2)
        self.down = Matrices(num, dim, width)

    def keep_fp8(self) -> None:
        self.gate_up.keep_fp8()
        self.down.keep_fp8()

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        super().process_weights_after_loading(kernels)
        self._packed = kernels.pack_experts(self.gate_up.loaded_weights, self.down.loaded_weights)
        del self.gate_up, self.down

    def forward(
        self, x_ND: Tensor, tokens_P: Tensor | None, slots_P: Tensor, num_ranks: int = 1
    ) -> Tensor:
        """What slot ``slots_P[i]`` makes of token ``tokens_P[i]``: [P, D]; undefined where the slot
        is S, which means that it is not here. Without tokens each has as many pairs, in order.
        Those that are not here are among them if they are the pairs of ``num_ranks``."""
        return self.kernels.fused_experts(x_ND, tokens_P, slots_P, *self._packed, num_ranks)
