"""Multi-head latent attention (MLA, arXiv:2405.04434) over a paged latent cache.

Shape legend: X rows (B sequences times Q rows of each), D hidden, H heads, C kv_lora_rank,
R qk_rope_head_dim, L = C + R, N qk_nope_head_dim, V v_head_dim, K qk_head_dim.

Prefill uses the expanded form and decoding the absorbed one. Both first write the latents of the
batch to the cache and then read all keys and values from there.
"""

from torch import Tensor

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import BLOCK, AttentionMetadata, Kernels, RopeCosSin
from tandem.model.network.batch import Batch
from tandem.model.network.layers import KernelModule, Linear, RMSNorm, concat_rows, same_format


class MLA(KernelModule):
    """MLA layer. The cache entry of a token is [normed latent (C), rotated shared key (R)]."""

    def __init__(self, config: ModelConfig, dim_in: int | None = None) -> None:
        super().__init__()
        self.config = config
        dim = dim_in or config.hidden_size
        num_heads = config.num_attention_heads
        q_dim = num_heads * config.qk_head_dim
        # kv_a is appended to the rows of q_a, so its FP8 blocks must start at a multiple of BLOCK.
        is_even = (config.q_lora_rank or q_dim) % BLOCK == 0
        if config.q_lora_rank is None:
            self.q_proj = Linear(dim, q_dim, is_even)
        else:
            self.q_a_proj = Linear(dim, config.q_lora_rank, is_even)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.lora_norm_eps)
            self.q_b_proj = Linear(config.q_lora_rank, q_dim)
        self.kv_a_proj_with_mqa = Linear(dim, config.latent_dim, is_even)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.lora_norm_eps)
        kv_dim = num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        # The absorbed form multiplies by its transpose, which the kernels cannot do in blocks of
        # FP8.
        self.kv_b_proj = Linear(config.kv_lora_rank, kv_dim, may_keep_fp8=False)
        self.o_proj = Linear(num_heads * config.v_head_dim, config.hidden_size)

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        """Fuse the query and latent down-projections, and split kv_b_proj by head.

        The absorbed form uses the two halves of kv_b_proj as separate matrices.
        """
        super().process_weights_after_loading(kernels)
        config = self.config
        name = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        first = getattr(self, name)
        second = self.kv_a_proj_with_mqa
        self._num_q = first.num_out
        self._num_down = first.num_out + second.num_out
        self._down = kernels.pack(
            concat_rows(*same_format(first.loaded_weights, second.loaded_weights))
        )
        delattr(self, name)
        del self.kv_a_proj_with_mqa
        up_HKC = self.kv_b_proj.weight.data.unflatten(0, (config.num_attention_heads, -1))
        up_k_HNC, up_v_HVC = up_HKC.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        self._up_k = kernels.pack(up_k_HNC.transpose(1, 2))
        self._up_v = kernels.pack(up_v_HVC)
        self._kv_b = kernels.pack(up_HKC)
        del self.kv_b_proj

    def forward(self, x_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> Tensor:
        """Write the latents of the batch to ``cache`` and return the attention output [X, D]."""
        config = self.config
        kernels = self.kernels
        q = self.write_cache(x_XD=x_XD, batch=batch, cache=cache, angles=angles)
        if config.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q_XHK = q.unflatten(1, (config.num_attention_heads, -1))
        attn = self._attention(batch, cache, angles)
        if batch.segments is None:
            ups = self._up_k, self._up_v
            out_XHV = kernels.mla_attend(q_XHK, *ups, attn, batch.context_lens_BQ)
        else:
            out_XHV = kernels.mla_prefill(
                q_THK=q_XHK,
                kv_b=self._kv_b,
                attn=attn,
                segments=batch.segments,
                num_values=config.v_head_dim,
            )
        return self.o_proj(out_XHV.flatten(1))

    def write_cache(self, x_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> Tensor:
        """Write the latents of the batch to ``cache`` and return the down-projected queries.

        Without ``q_lora_rank`` these are the queries themselves.
        """
        down = self.kernels.linear(x_XD, self._down, self._num_down)
        kv_XL = down[:, self._num_q :]
        norm = self.kv_a_layernorm
        slots_X = batch.write_slots_BQ
        attn = self._attention(batch, cache, angles)
        self.kernels.write_mla_cache(
            kv_XL=kv_XL, weight_C=norm.weight, eps=norm.eps, attn=attn, slots_X=slots_X.flatten()
        )
        return down[:, : self._num_q]

    def _attention(self, batch: Batch, cache: Tensor, angles: RopeCosSin) -> AttentionMetadata:
        config = self.config
        rest = batch.page_table_BP, config.softmax_scale
        return AttentionMetadata(*angles, config.rope_interleave, cache, *rest, batch.bits_BQ)
