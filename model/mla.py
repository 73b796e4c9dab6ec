"""Multi-head latent attention over a paged latent cache, expanded and absorbed (spec §3).

Shape legend: B sequences, Q query rows, S context slots, D hidden, H heads, C kv_lora_rank,
R qk_rope_head_dim, N qk_nope_head_dim, V v_head_dim.

Both forms read keys and values from the cache alone, after this pass's rows were written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.batch import Batch, gather_pages, visible_slots
from model.config import ModelConfig
from model.latent_attention import latent_attention
from model.layers import RMSNorm, Rope, linear


class MLA(nn.Module):
    """The cached entry of a token is [normed latent (C), rotated shared key (R)]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, num_heads = config.hidden_size, config.num_attention_heads
        q_dim = num_heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = linear(dim, q_dim)
        else:
            self.q_a_proj = linear(dim, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.lora_norm_eps)
            self.q_b_proj = linear(config.q_lora_rank, q_dim)
        self.kv_a_proj_with_mqa = linear(dim, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.lora_norm_eps)
        kv_dim = num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = linear(config.kv_lora_rank, kv_dim)
        self.o_proj = linear(num_heads * config.v_head_dim, dim)

    def forward(self, x_BQD: Tensor, batch: Batch, cache: Tensor, rope: Rope) -> Tensor:
        """Attention output [B, Q, D]; writes this pass's latents into ``cache``."""
        cos, sin = rope.at(batch.positions_BQ)
        q_nope_BQHN, q_pe_BQHR = self._queries(x_BQD)
        q_pe_BQHR = rope.rotate(q_pe_BQHR, cos.unsqueeze(2), sin.unsqueeze(2))
        self._write(x_BQD, cos, sin, batch, cache, rope)
        attend = self._expanded if batch.expanded else self._absorbed
        return self.o_proj(attend(q_nope_BQHN, q_pe_BQHR, cache, batch).flatten(2))

    def _queries(self, x_BQD: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(x_BQD)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BQD)))
        q_BQHK = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        nope, pe = q_BQHK.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        return nope, pe

    def _write(
        self, x_BQD: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: Tensor, rope: Rope
    ) -> None:
        config = self.config
        latent, k_pe = self.kv_a_proj_with_mqa(x_BQD).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], -1
        )
        entry = torch.cat((self.kv_a_layernorm(latent), rope.rotate(k_pe, cos, sin)), -1)
        cache.flatten(0, 1)[batch.write_slots_BQ] = entry

    def _expanded(
        self, q_nope_BQHN: Tensor, q_pe_BQHR: Tensor, cache: Tensor, batch: Batch
    ) -> Tensor:
        """Keys and values of every head rebuilt from the latents: fewest flops for long Q."""
        config = self.config
        context_BSL = gather_pages(cache, batch.page_table_BP)
        c_BSC, k_pe_BSR = context_BSL.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        kv_BHSK = (
            self.kv_b_proj(c_BSC).unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
        )
        k_nope, v_BHSV = kv_BHSK.split([config.qk_nope_head_dim, config.v_head_dim], -1)
        k_pe = k_pe_BSR.unsqueeze(1).expand(-1, config.num_attention_heads, -1, -1)
        q_BHQK = torch.cat((q_nope_BQHN, q_pe_BQHR), -1).transpose(1, 2)
        out_BHQV = F.scaled_dot_product_attention(
            q_BHQK,
            torch.cat((k_nope, k_pe), -1),
            # Equal widths, or the fused kernels refuse and all scores are written out.
            F.pad(v_BHSV, (0, max(0, config.qk_head_dim - config.v_head_dim))),
            attn_mask=visible_slots(batch, context_BSL.shape[1]).unsqueeze(1),
            scale=config.softmax_scale,
        )
        return out_BHQV[..., : config.v_head_dim].transpose(1, 2)

    def _absorbed(
        self, q_nope_BQHN: Tensor, q_pe_BQHR: Tensor, cache: Tensor, batch: Batch
    ) -> Tensor:
        """Queries carried into latent space: one shared key of width C + R, value of width C."""
        config = self.config
        up_HKC = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))
        up_k_HNC, up_v_HVC = up_HKC.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        q_BQHC = torch.einsum("bqhn,hnc->bqhc", q_nope_BQHN, up_k_HNC)
        q_BQHL = torch.cat((q_BQHC, q_pe_BQHR), -1)
        attend = latent_attention(cache.device.type)
        o_BQHC = attend(q_BQHL, cache, batch, config.kv_lora_rank, config.softmax_scale)
        return torch.einsum("bqhc,hvc->bqhv", o_BQHC, up_v_HVC)
