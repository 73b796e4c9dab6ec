"""The routed experts of one rank in one MoE layer, as fused weights.

Shape legend: N tokens on this rank, P (token, expert) pairs, S slots, D hidden, F width.
"""

from torch import Tensor

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import Kernels
from tandem.model.network.layers import KernelModule, Matrices


class Experts(KernelModule):
    """Routed experts of one layer; slot i holds expert ``expert_ids[i]``.

    In ``gate_up`` the gate rows come first.
    """

    def __init__(self, config: ModelConfig, expert_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.expert_ids = expert_ids
        num = len(expert_ids)
        dim = config.hidden_size
        width = config.moe_intermediate_size
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
        """Run expert ``slots_P[i]`` on token ``tokens_P[i]`` for each pair i: [P, D].

        Args:
            x_ND: Hidden states of the tokens.
            tokens_P: Token of each pair. None: every token has P / N consecutive pairs.
            slots_P: Slot of each pair. S stands for an expert of another rank, whose output is
                undefined.
            num_ranks: Number of ranks whose experts the pairs refer to.
        """
        return self.kernels.fused_experts(x_ND, tokens_P, slots_P, *self._packed, num_ranks)
