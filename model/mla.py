"""Multi-head latent attention over a paged latent cache, expanded and absorbed (spec §3).

Shape legend: X rows (B sequences times Q rows of each), D hidden, H heads, C kv_lora_rank,
R qk_rope_head_dim, L = C + R, N qk_nope_head_dim, V v_head_dim, K qk_head_dim; packed: T rows,
S slots of all segments' pages, q rows and s slots of one.

Both forms read keys and values from the cache alone, after this pass's rows were written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.batch import Batch, Segments, gather_pages
from model.config import ModelConfig
from model.kernels.base import Angles, Kernels, rotate
from model.layers import Linear, Part, RMSNorm


class MLA(Part):
    """The cached entry of a token is [normed latent (C), rotated shared key (R)]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, num_heads = config.hidden_size, config.num_attention_heads
        q_dim = num_heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(dim, q_dim)
        else:
            self.q_a_proj = Linear(dim, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.lora_norm_eps)
            self.q_b_proj = Linear(config.q_lora_rank, q_dim)
        self.kv_a_proj_with_mqa = Linear(dim, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.lora_norm_eps)
        kv_dim = num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(config.kv_lora_rank, kv_dim)
        self.o_proj = Linear(num_heads * config.v_head_dim, dim)

    def adopt(self, kernels: Kernels) -> None:
        """What reads the same input becomes one product; the absorbed form's matrices are those of
        kv_b_proj, by head."""
        super().adopt(kernels)
        config = self.config
        first = self.q_proj if config.q_lora_rank is None else self.q_a_proj
        down = torch.cat((first.weight, self.kv_a_proj_with_mqa.weight))
        self._num_q, self._num_down = first.num_out, len(down)
        self._down = kernels.pack(down)
        del self.kv_a_proj_with_mqa
        if config.q_lora_rank is None:
            del self.q_proj
        else:
            del self.q_a_proj
        up_HKC = self.kv_b_proj.weight.data.unflatten(0, (config.num_attention_heads, -1))
        up_k_HNC, up_v_HVC = up_HKC.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        self._up_k = kernels.pack(up_k_HNC.transpose(1, 2))
        self._up_v = kernels.pack(up_v_HVC)

    def forward(self, x_XD: Tensor, batch: Batch, cache: Tensor, angles: Angles) -> Tensor:
        """Attention output [X, D]; writes this pass's latents into ``cache``."""
        config, kernels = self.config, self.kernels
        down = kernels.linear(x_XD, self._down, self._num_down)
        q, kv_XL = down[:, : self._num_q], down[:, self._num_q :]
        if config.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_XHK = q.unflatten(1, (config.num_attention_heads, -1))
        norm, is_interleaved = self.kv_a_layernorm, config.rope_interleave
        slots_X = batch.write_slots_BQ.flatten()
        kernels.mla_entry(kv_XL, norm.weight, norm.eps, *angles, is_interleaved, slots_X, cache)
        if batch.segments is None:
            ups, pages = (self._up_k, self._up_v), (batch.page_table_BP, batch.context_lens_BQ)
            scale = config.softmax_scale
            out_XHV = kernels.mla_attend(q_XHK, *ups, *angles, is_interleaved, cache, *pages, scale)
        else:
            out_XHV = self._expanded(self._rotated(q_XHK, angles), cache, batch, batch.segments)
        return self.o_proj(out_XHV.flatten(1))

    def _rotated(self, q_XHK: Tensor, angles: Angles) -> Tensor:
        config, (cos, sin) = self.config, angles
        nope, pe = q_XHK.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        pe = rotate(pe, (cos.unsqueeze(1), sin.unsqueeze(1)), config.rope_interleave)
        return torch.cat((nope, pe), -1)

    def _expanded(self, q_THK: Tensor, cache: Tensor, batch: Batch, segments: Segments) -> Tensor:
        """Attention output [T, H, V], zeros for padding. Keys and values of every head are rebuilt
        from the latents: fewest flops for many rows."""
        page_size, width, row = cache.shape[1], self.config.v_head_dim, 0
        pages = [-(-context // page_size) * page_size for context in segments.contexts]
        k_SHK, v_SHK = self._keys_values(gather_pages(cache, batch.page_table_BP)[0])
        keys, values = k_SHK.split(pages), v_SHK.split(pages)
        out_THV = q_THK.new_zeros(*q_THK.shape[:2], width)
        for i, (num, context) in enumerate(zip(segments.lengths, segments.contexts, strict=True)):
            rows = slice(row, row + num)
            out = self._attend(
                q_THK[rows], keys[i][:context], values[i][:context], segments.masks[i]
            )
            out_THV[rows] = out[..., :width]
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
        q, k, v = (x.transpose(0, 1) for x in (q_qHK, k_sHK, v_sHK))
        return self.kernels.attend(q, k, v, mask, self.config.softmax_scale).transpose(0, 1)
