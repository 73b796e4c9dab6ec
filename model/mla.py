"""Multi-head latent attention over a paged latent cache, expanded and absorbed (spec §3).

Shape legend: B sequences, Q query rows, D hidden, H heads, C kv_lora_rank, R qk_rope_head_dim,
N qk_nope_head_dim, V v_head_dim, K qk_head_dim; packed: T rows, S slots of all segments' pages,
q rows and s slots of one.

Both forms read keys and values from the cache alone, after this pass's rows were written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.batch import Batch, Segments, gather_pages
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
        if batch.segments is None:
            out_BQHV = self._absorbed(q_nope_BQHN, q_pe_BQHR, cache, batch)
        else:
            q_THK = torch.cat((q_nope_BQHN, q_pe_BQHR), -1)[0]
            out_BQHV = self._expanded(q_THK, cache, batch, batch.segments).unsqueeze(0)
        return self.o_proj(out_BQHV.flatten(2))

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

    def _expanded(self, q_THK: Tensor, cache: Tensor, batch: Batch, segments: Segments) -> Tensor:
        """Attention output [T, H, V], zeros for padding. Keys and values of every head are rebuilt
        from the latents: fewest flops for many rows."""
        page_size, width, row = cache.shape[1], self.config.v_head_dim, 0
        pages = [-(-context // page_size) * page_size for context in segments.contexts]
        k_SHK, v_SHK = self._keys_values(gather_pages(cache, batch.page_table_BP)[0])
        keys, values = k_SHK.split(pages), v_SHK.split(pages)
        out_THV = q_THK.new_zeros(*q_THK.shape[:2], width)
        for i, (num, context) in enumerate(zip(segments.lengths, segments.contexts, strict=True)):
            rows, k, v = slice(row, row + num), keys[i][:context], values[i][:context]
            out_THV[rows] = self._attend(q_THK[rows], k, v, segments.masks[i])[..., :width]
            row += num
        return out_THV

    def _keys_values(self, context_SL: Tensor) -> tuple[Tensor, Tensor]:
        """Values are padded to the width of keys, or the fused kernels refuse and all scores are
        written out."""
        config = self.config
        c_SC, k_pe_SR = context_SL.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(c_SC).unflatten(-1, (config.num_attention_heads, -1))
        k_nope, v_SHV = kv.split([config.qk_nope_head_dim, config.v_head_dim], -1)
        k_pe = k_pe_SR.unsqueeze(1).expand(-1, config.num_attention_heads, -1)
        padding = max(0, config.qk_head_dim - config.v_head_dim)
        return torch.cat((k_nope, k_pe), -1), F.pad(v_SHV, (0, padding))

    def _attend(self, q_qHK: Tensor, k_sHK: Tensor, v_sHK: Tensor, mask: Tensor | None) -> Tensor:
        """One segment over its own context."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_qHK, k_sHK, v_sHK))
        scale = self.config.softmax_scale
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
        return out[0].transpose(0, 1)

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
