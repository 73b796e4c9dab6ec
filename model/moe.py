"""Routing and experts (spec §4).

Shape legend: T tokens, D hidden, E routed experts, G groups, K experts per token, F width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
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


class Experts(nn.Module):
    """All routed experts of a layer, fused: gate rows first, then up rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num, dim, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * width, dim), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num, dim, width), requires_grad=False)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum [T, D] of the chosen experts' outputs: rows sorted by expert, one grouped
        product per projection. Shapes do not depend on the routing, and nothing waits for it."""
        num_experts, num_per_token = self.down_proj.shape[0], ids_TK.shape[1]
        expert_of, order = ids_TK.flatten().sort(stable=True)
        token_of = order // num_per_token
        counts_E = expert_of.new_zeros(num_experts).scatter_add(
            0, expert_of, torch.ones_like(expert_of)
        )
        ends_E = counts_E.cumsum(0).int()
        hidden = _silu_mul(
            F.grouped_mm(x_TD[token_of], self.gate_up_proj.transpose(1, 2), offs=ends_E)
        )
        out = F.grouped_mm(hidden, self.down_proj.transpose(1, 2), offs=ends_E)
        out = out * weights_TK.flatten()[order].unsqueeze(1).to(x_TD.dtype)
        return torch.zeros_like(x_TD).index_add(0, token_of, out)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class MoE(nn.Module):
    """Routed experts plus the always-on shared experts (one MLP, unscaled)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = GatedMLP(config.hidden_size, shared_width) if shared_width else None

    def forward(self, x: Tensor) -> Tensor:
        """x and result [..., D]."""
        x_TD = x.flatten(0, -2)
        y_TD = self.experts(x_TD, *self.gate(x_TD))
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(x)
