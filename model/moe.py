"""Routing, and what becomes of the experts' outputs (spec §4).

Shape legend: T tokens, D hidden, E routed experts, G groups, K experts per token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.dispatch.base import Dispatch
from model.experts import Experts
from model.layers import GatedMLP


class Gate(nn.Module):
    """Chooses experts in fp32; ties go to the lowest expert id."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.select = _SELECTORS[config.topk_method]
        self.weight = nn.Parameter(
            torch.empty(config.n_routed_experts, config.hidden_size), requires_grad=False
        )
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias: Tensor
            bias = torch.empty(config.n_routed_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] int64 and their weights [T, K] fp32."""
        config = self.config
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        sigmoid = config.scoring_func == "sigmoid"
        scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
        ids_TK = self.select(self, scores_TE)
        weights_TK = scores_TE.gather(1, ids_TK)
        if config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * config.routed_scaling_factor


def top_ids(scores: Tensor, num: int) -> Tensor:
    """Ids of the ``num`` largest along the last axis, lowest id first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :num]


def _keep_groups(scores_TE: Tensor, group_scores_TG: Tensor, num_groups: int) -> Tensor:
    """True for experts [T, E] of the ``num_groups`` best groups (contiguous ids)."""
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(1, top_ids(group_scores_TG, num_groups), True)
    return kept_TG.repeat_interleave(scores_TE.shape[1] // kept_TG.shape[1], 1)


def select_noaux_tc(gate: Gate, scores_TE: Tensor) -> Tensor:
    """Bias for selection only; a group scores by its two best; others are -inf, not 0."""
    config = gate.config
    biased_TE = scores_TE + gate.e_score_correction_bias
    if config.n_group > 1:
        grouped = biased_TE.unflatten(1, (config.n_group, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept = _keep_groups(biased_TE, group_scores, config.topk_group)
        biased_TE = biased_TE.masked_fill(~kept, float("-inf"))
    return top_ids(biased_TE, config.num_experts_per_tok)


def select_greedy(gate: Gate, scores_TE: Tensor) -> Tensor:
    return top_ids(scores_TE, gate.config.num_experts_per_tok)


def select_group_limited(gate: Gate, scores_TE: Tensor) -> Tensor:
    """DeepSeek-V2: a group scores by its best expert."""
    config = gate.config
    group_scores = scores_TE.unflatten(1, (config.n_group, -1)).amax(-1)
    kept = _keep_groups(scores_TE, group_scores, config.topk_group)
    return top_ids(scores_TE.masked_fill(~kept, 0.0), config.num_experts_per_tok)


_SELECTORS: dict[str, Callable[[Gate, Tensor], Tensor]] = {
    "noaux_tc": select_noaux_tc,
    "greedy": select_greedy,
    "group_limited_greedy": select_group_limited,
}


class MoE(nn.Module):
    """Routed experts, which ``dispatch`` brings tokens to, plus the always-on shared experts (one
    MLP, unscaled). ``layer`` counts MoE layers from 0 on."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch, layer: int) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.dispatch, self.layer = dispatch, layer
        self.experts = Experts(config, dispatch.held(layer))
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config.hidden_size, shared_width) if shared_width else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x and result [..., D]; ``real`` [...] is False for padding, None if there is none."""
        x_TD, real_T = x.flatten(0, -2), None if real is None else real.flatten()
        ids_TK, weights_TK = self.gate(x_TD)
        out_TKD = self.dispatch.run(self.layer, self.experts, x_TD, ids_TK, real_T)
        y_TD = combine(out_TKD, weights_TK)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(x)


def combine(out_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum [T, D] of each token's experts, in fp32, from the best one on: the same
    wherever they were computed."""
    y_TD = out_TKD[:, 0].float() * weights_TK[:, :1]
    for k in range(1, out_TKD.shape[1]):
        y_TD = torch.addcmul(y_TD, out_TKD[:, k].float(), weights_TK[:, k : k + 1])
    return y_TD.to(out_TKD.dtype)
