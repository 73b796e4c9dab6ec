"""Routing, and what becomes of the experts' outputs (spec §4).

Shape legend: T tokens, D hidden, E routed experts, K experts per token.
"""

import torch
from torch import Tensor

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import BranchOutput, Kernels, Routing
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.experts import Experts
from tandem.model.network.layers import GatedMLP, KernelModule, Matrices


class Gate(Matrices):
    """Chooses experts in fp32; ties go to the lowest expert id."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.n_routed_experts, config.hidden_size)
        self.routing = routing_of(config)
        has_bias = config.topk_method == "noaux_tc"
        bias = torch.empty(config.n_routed_experts, dtype=torch.float32) if has_bias else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", bias)

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        super().process_weights_after_loading(kernels)
        self._packed = kernels.pack(self.loaded_weights)
        del self.weight

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] int64 and their weights [T, K] fp32."""
        return self.kernels.route(x_TD, self._packed, self.e_score_correction_bias, self.routing)


def routing_of(config: ModelConfig) -> Routing:
    """noaux_tc adds its bias for selection only, and drops other groups altogether; DeepSeek-V2
    lets their experts score 0."""
    has_bias, is_greedy = config.topk_method == "noaux_tc", config.topk_method == "greedy"
    num_groups, num_kept = (1, 1) if is_greedy else (config.n_group, config.topk_group)
    return Routing(
        (config.n_routed_experts, num_groups, num_kept, config.num_experts_per_tok),
        uses_sigmoid=config.scoring_func == "sigmoid",
        sums_top_two=has_bias,
        is_normalised=config.norm_topk_prob,
        masked_score=float("-inf") if has_bias else 0.0,
        factor=config.routed_scaling_factor,
    )


class MoE(KernelModule):
    """Routed experts, which ``dispatch`` brings tokens to, plus the always-on shared experts (one
    MLP, unscaled). ``layer`` counts MoE layers from 0 on."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch, layer: int) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.dispatch, self.layer = dispatch, layer
        self.experts = Experts(config, dispatch.local_experts(layer))
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config.hidden_size, shared_width) if shared_width else None

    def forward(self, x_TD: Tensor, real_T: Tensor | None = None) -> BranchOutput:
        """Of x [T, D], what the next norm adds; ``real_T`` is False for padding, None if there is
        none. How outputs are summed depends on nothing but the token: the same wherever they were
        computed."""
        shared = self.shared_experts
        wait_for_shared = (
            None if shared is None else self.kernels.run_concurrently(lambda: shared(x_TD))
        )
        ids_TK, weights_TK = self.gate(x_TD)
        out_TKD = self.dispatch.run_experts(self.layer, self.experts, x_TD, ids_TK, real_T)
        return self.kernels.combine(
            out_TKD, weights_TK, None if wait_for_shared is None else wait_for_shared()
        )
