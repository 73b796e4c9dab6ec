"""Minimum time of a step, from the bytes it must move and the multiplications it must do.

Both are divided by the rates measured on the same device (ceilings.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.model.checkpoint.config import ModelConfig


@dataclass(frozen=True)
class Rates:
    """Rates of a device. ``copied`` counts bytes read plus bytes written."""

    copied_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    num_bytes: float
    num_flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def floor_s(self, rates: Rates) -> float:
        return max(self.num_bytes / rates.copied_bytes_per_s, self.num_flops / rates.flops_per_s)


ITEM_BYTES = 2


def product(num_weights: float, num_tokens: float, item_bytes: int = ITEM_BYTES) -> Work:
    """Return the work of a product. Weights are read once; activations are negligible or stay on
    chip."""
    return Work(item_bytes * num_weights, 2 * num_weights * num_tokens)


def attention(config: ModelConfig, num_rows: int, num_q: int, context: int) -> Work:
    """Return the work of attention over latents, which all heads and queries of a row share.

    This is the absorbed form of docs/concepts/model.md.
    """
    entries = num_rows * context
    flops = 2 * entries * num_q * config.num_attention_heads
    flops *= config.latent_dim + config.kv_lora_rank
    return Work(ITEM_BYTES * entries * config.latent_dim, flops)


def layer(
    config: ModelConfig,
    is_moe: bool,
    num_tokens: int,
    num_experts_hit: int,
    item_bytes: int = ITEM_BYTES,
) -> Work:
    """Return the work of one layer's products; ``num_experts_hit`` routed experts are read.

    ``item_bytes`` is the size of a weight, except the absorbed ones and the gate's.
    """
    c, dim = config, config.hidden_size
    q_dim = c.num_attention_heads * c.qk_head_dim
    q_rank = c.q_lora_rank
    weights = dim * c.latent_dim + c.num_attention_heads * c.v_head_dim * dim
    weights += dim * q_dim if q_rank is None else dim * q_rank + q_rank * q_dim
    absorbed = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    work = product(absorbed, num_tokens)
    if not is_moe:
        return work + product(weights + 3 * dim * c.intermediate_size, num_tokens, item_bytes)
    expert = 3 * dim * c.moe_intermediate_size
    work += product(weights + c.n_shared_experts * expert, num_tokens, item_bytes)
    work += product(dim * c.n_routed_experts, num_tokens)
    chosen = 2 * expert * num_tokens * c.num_experts_per_tok
    return work + Work(item_bytes * expert * num_experts_hit, chosen)


def decode_step(
    config: ModelConfig,
    num_rows: int,
    num_drafts: int,
    context: int,
    hit_by_drafts: Sequence[int],
    hit_by_layers: Sequence[int],
    item_bytes: int = ITEM_BYTES,
) -> Work:
    """Return the work of verifying n + 1 tokens per row and of n passes of the MTP layer.

    Each pass covers one token per row. Before the first one, the MTP layer computes the cache
    entries of all verified tokens. ``hit_by_drafts`` and ``hit_by_layers`` have the experts hit in
    each pass and MoE layer.
    """
    c, num_tokens, hits = config, num_rows * (num_drafts + 1), iter(hit_by_layers)
    work = product(c.vocab_size * c.hidden_size, num_tokens)
    for i in range(c.num_hidden_layers):
        is_moe = c.is_moe_layer(i)
        work += layer(c, is_moe, num_tokens, next(hits) if is_moe else 0, item_bytes)
        work += attention(c, num_rows, num_drafts + 1, context)
    assert next(hits, None) is None, "one number for each MoE layer"
    for i, num_hit in enumerate(hit_by_drafts):
        work += layer(c, True, num_rows, num_hit, item_bytes)
        work += attention(c, num_rows, 1, context)
        work += product(2 * c.hidden_size**2, num_tokens if i == 0 else num_rows, item_bytes)
        work += product(c.vocab_size * c.hidden_size, num_rows)
    return work


def prefill(config: ModelConfig, num_tokens: int) -> Work:
    """Return the work of one prompt. All experts are hit; keys and values of all heads are rebuilt
    once."""
    c = config
    pairs = num_tokens * (num_tokens + 1) / 2
    per_pair = 2 * c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
    work = product(c.vocab_size * c.hidden_size, 1)
    for i in range(c.num_hidden_layers):
        work += layer(c, c.is_moe_layer(i), num_tokens, c.n_routed_experts)
        work += Work(ITEM_BYTES * num_tokens * c.latent_dim, per_pair * pairs)
    return work
