"""Trainable DeepSeek-V3 network: MLA, noaux_tc experts and one MTP layer.

Parameter names equal the checkpoint's, except that the experts of a layer are stacked.
Shapes: B sequences, T tokens, D hidden_size, H heads, E routed experts, I expert width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]
FLASH_LENGTH = 512


@dataclass(frozen=True)
class NetworkConfig:
    """Architecture of the tiny checkpoint; field names as in config.json."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    moe_intermediate_size: int = 48
    num_hidden_layers: int = 10
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    first_k_dense_replace: int = 1
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 2
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest scores of the last axis; ties go to the lowest index."""
    order = torch.arange(scores.shape[-1], device=scores.device)
    mine, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    earlier = order.unsqueeze(0) < order.unsqueeze(-1)
    ahead = (other > mine) | ((other == mine) & earlier)
    return ahead.sum(-1) < k


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply RoPE to [..., T, dr] in split-half layout; table [2, T, dr / 2] holds cos and sin."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = table[0], table[1]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Multi-head latent attention over whole sequences.

    The latent is wider than the hidden state here, so it is never computed. Its norm comes from the
    Gram matrix of its projection, and the two key-value projections are multiplied first. Weight
    rows are permuted to make RoPE pairs contiguous, which does not change q.k.
    """

    rope_rows: Tensor
    query_rows: Tensor

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__()
        self.heads, self.rank, self.eps = c.num_attention_heads, c.kv_lora_rank, c.rms_norm_eps
        self.nope, self.rope, self.value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        query, hidden = self.nope + self.rope, c.hidden_size
        self.q_a_proj = nn.Linear(hidden, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, self.heads * query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        pairs = torch.arange(self.rope).view(-1, 2).t().flatten()
        one_head = torch.cat([torch.arange(self.nope), self.nope + pairs])
        rows = (torch.arange(self.heads)[:, None] * query + one_head).flatten()
        self.register_buffer("rope_rows", pairs, persistent=False)
        self.register_buffer("query_rows", rows, persistent=False)

    def project(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [B, T, D] to q and k [B, H, T, dn + dr] and v [B, H, T, dv]."""
        batch, length, _ = x.shape
        latent, rope = self.kv_a_proj_with_mqa.weight.split([self.rank, self.rope])
        key_value = (self.kv_b_proj.weight * self.kv_a_layernorm.weight) @ latent
        gram = latent.t() @ latent / self.rank
        parts = [self.q_a_proj.weight, rope[self.rope_rows], key_value, gram]
        q, k_rope, kv, moment = F.linear(x, torch.cat(parts)).split([len(p) for p in parts], -1)
        mean_square = (moment * x).sum(-1, keepdim=True).clamp_min(0)
        kv = (kv * torch.rsqrt(mean_square + self.eps)).view(batch, length, self.heads, -1)
        k_nope, v = kv.transpose(1, 2).split([self.nope, self.value], dim=-1)
        k_rope = rotate(k_rope, table).unsqueeze(1).expand(-1, self.heads, -1, -1)
        q = F.linear(self.q_a_layernorm(q), self.q_b_proj.weight[self.query_rows])
        q = q.view(batch, length, self.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([q_nope, rotate(q_rope, table)], dim=-1)
        return q, torch.cat([k_nope, k_rope], dim=-1), v

    def forward(self, x: Tensor, table: Tensor, depths: list[KeyValue] | None = None) -> Tensor:
        """Attend causally: [B, T, D] -> [B, T, D].

        ``depths`` has the keys and values of earlier MTP depths, to which those of ``x`` are added.
        """
        q, k, v = self.project(x, table)
        if depths is not None:
            depths.append((k, v))
        if depths is None or len(depths) == 1:
            out = attend_causal(q, k, v)
        else:
            out = attend_unrolled(q, depths)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [B, H, T, dv].

    The values of long sequences are padded to the width of the keys for the flash kernel.
    """
    width = v.shape[-1]
    if q.shape[-2] > FLASH_LENGTH:
        v = F.pad(v, (0, k.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :width]


def attend_unrolled(q: Tensor, depths: list[KeyValue]) -> Tensor:
    """Return attention [B, H, T, dv] over unrolled MTP depths.

    Row i sees depth 1 of rows up to i, and only row i of later depths.
    """
    q = q * q.shape[-1] ** -0.5
    (first_k, first_v), later = depths[0], depths[1:]
    length = q.shape[-2]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ first_k.transpose(-1, -2)).masked_fill(~causal, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1)
    out = weights[..., :length] @ first_v
    for index, (_, v) in enumerate(later):
        out = out + weights[..., length + index, None] * v
    return out


class MLP(nn.Module):
    """Gated SiLU feed-forward layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map [B, T, D] to [B, T, D]; the second result, the expert load, is always None."""
        weight = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up), None


class Experts(nn.Module):
    """Stacked routed experts: gate and up [E, I, D], down [E, D, I]."""

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__()
        shape = (c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(shape))
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape).transpose(1, 2).contiguous())


class Router(nn.Module):
    """Group-limited sigmoid routing (noaux_tc), in fp32."""

    e_score_correction_bias: Tensor

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__()
        self.config = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [B, T, E], 0 for experts not chosen, and the tokens per expert [E]."""
        c = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            biased = scores + self.e_score_correction_bias
            groups = biased.unflatten(-1, (c.n_group, -1))
            strength = (groups * top_mask(groups, 2)).sum(-1)
            allowed = top_mask(strength, c.topk_group).unsqueeze(-1).expand_as(groups).flatten(-2)
            chosen = top_mask(biased.masked_fill(~allowed, -torch.inf), c.num_experts_per_tok)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return weights, chosen.float().sum((0, 1))


class MoE(nn.Module):
    """All experts computed as one wide gated MLP; the shared expert is its last slice."""

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map [B, T, D] to [B, T, D]; the second result is the tokens per expert [E]."""
        routed, shared = self.experts, self.shared_experts
        weights, load = self.gate(x)
        gate = torch.cat([routed.gate_proj.flatten(0, 1), shared.gate_proj.weight])
        up = torch.cat([routed.up_proj.flatten(0, 1), shared.up_proj.weight])
        down = torch.cat([routed.down_proj.transpose(0, 1).flatten(1), shared.down_proj.weight], 1)
        first, second = F.linear(x, torch.cat([gate, up])).chunk(2, dim=-1)
        scale = weights.repeat_interleave(routed.gate_proj.shape[1], dim=-1)
        scale = F.pad(scale, (0, len(shared.gate_proj.weight)), value=1.0)
        return F.linear(F.silu(first) * second * scale, down), load


class DecoderLayer(nn.Module):
    """Attention and feed-forward layer with pre-norms and residuals."""

    def __init__(self, c: NetworkConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c)

    def forward(
        self, x: Tensor, table: Tensor, depths: list[KeyValue] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map [B, T, D] to [B, T, D]; the second result is tokens per expert [E], None if dense."""
        x = x + self.self_attn(self.input_layernorm(x), table, depths)
        out, load = self.mlp(self.post_attention_layernorm(x))
        return x + out, load
