"""Routing, and what becomes of the experts' outputs (spec §4).

Shape legend: T tokens, D hidden, E routed experts, K experts per token.
"""

import torch
from torch import Tensor

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import Kernels, More, Routing
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.experts import Experts
from tandem.model.network.layers import GatedMLP, Matrices, Part


class Gate(Matrices):
    """Chooses experts in fp32; ties go to the lowest expert id."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.n_routed_experts, config.hidden_size)
        self.how = routing(config)
        has_bias = config.topk_method == "noaux_tc"
        bias = torch.empty(config.n_routed_experts, dtype=torch.float32) if has_bias else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", bias)

    def adopt(self, kernels: Kernels) -> None:
        super().adopt(kernels)
        self._packed = kernels.pack(self.stored)
        del self.weight

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] int64 and their weights [T, K] fp32."""
        return self.kernels.route(x_TD, self._packed, self.e_score_correction_bias, self.how)


def routing(config: ModelConfig) -> Routing:
    """noaux_tc adds its bias for selection only, and drops other groups altogether; DeepSeek-V2
    lets their experts score 0."""
    has_bias, is_greedy = config.topk_method == "noaux_tc", config.topk_method == "greedy"
    num_groups, num_kept = (1, 1) if is_greedy else (config.n_group, config.topk_group)
    return Routing(
        (config.n_routed_experts, num_groups, num_kept, config.num_experts_per_tok),
        sigmoid=config.scoring_func == "sigmoid",
        by_two=has_bias,
        normalised=config.norm_topk_prob,
        filler=float("-inf") if has_bias else 0.0,
        factor=config.routed_scaling_factor,
    )


class MoE(Part):
    """Routed experts, which ``dispatch`` brings tokens to, plus the always-on shared experts (one
    MLP, unscaled). ``layer`` counts MoE layers from 0 on."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch, layer: int) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.dispatch, self.layer = dispatch, layer
        self.experts = Experts(config, dispatch.held(layer))
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config.hidden_size, shared_width) if shared_width else None

    def forward(self, x_TD: Tensor, real_T: Tensor | None = None) -> More:
        """Of x [T, D], what the next norm adds; ``real_T`` is False for padding, None if there is
        none. How outputs are summed depends on nothing but the token: the same wherever they were
        computed."""
        shared = self.shared_experts
        beside = None if shared is None else self.kernels.beside(lambda: shared(x_TD))
        ids_TK, weights_TK = self.gate(x_TD)
        out_TKD = self.dispatch.run(self.layer, self.experts, x_TD, ids_TK, real_T)
        return self.kernels.combine(out_TKD, weights_TK, None if beside is None else beside())
