"""Mixture-of-experts layers: gate, dispatch to the routed experts, and shared experts.

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
    """Gate that chooses experts in fp32. Of equal scores it takes the lowest expert id."""

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
        """Return expert ids [T, K] int64 and their weights [T, K] fp32."""
        return self.kernels.route(
            x_TD=x_TD,
            packed=self._packed,
            bias_E=self.e_score_correction_bias,
            routing=self.routing,
        )


def routing_of(config: ModelConfig) -> Routing:
    """Return the parameters of the model's gate.

    With noaux_tc, the bias affects only the selection, and experts of groups that were not kept
    cannot be chosen. In DeepSeek-V2 these experts score 0 instead.
    """
    has_bias = config.topk_method == "noaux_tc"
    is_greedy = config.topk_method == "greedy"
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
    """MoE layer: routed experts, reached through ``dispatch``, plus unscaled shared experts.

    All shared experts form one MLP. ``layer`` is the index among the MoE layers, from 0.
    """

    def __init__(self, config: ModelConfig, dispatch: Dispatch, layer: int) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.dispatch = dispatch
        self.layer = layer
        self.experts = Experts(config, dispatch.local_experts(layer))
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config.hidden_size, shared_width) if shared_width else None

    def forward(self, x_TD: Tensor, real_T: Tensor | None = None) -> BranchOutput:
        """Return the layer's output for x [T, D], which the next norm adds to the residual stream.

        ``real_T`` is False for padding rows, None without padding. The order in which expert
        outputs are summed depends only on the token, not on the ranks that computed them.
        """
        shared = self.shared_experts
        wait_for_shared = (
            None if shared is None else self.kernels.run_concurrently(lambda: shared(x_TD))
        )
        ids_TK, weights_TK = self.gate(x_TD)
        out_TKD = self.dispatch.run_experts(
            layer=self.layer, experts=self.experts, x_TD=x_TD, ids_TK=ids_TK, real_T=real_T
        )
        return self.kernels.combine(
            out_TKD, weights_TK, None if wait_for_shared is None else wait_for_shared()
        )
