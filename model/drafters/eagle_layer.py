"""The layer of an EAGLE head, over embeddings and features of the main model (EAGLE-1, arXiv
2401.15077; EAGLE-3, arXiv 2503.01840). Parameters have the authors' names.

Shape legend: X rows, D hidden, F = taps x D features, H heads, K head width. G heads with keys and
values, L values of an entry, V vocabulary, U draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.model.drafters.eagle_config import EagleConfig
from tandem.model.kernels.base import AttentionMetadata, Kernels, RopeCosSin
from tandem.model.network.batch import Batch
from tandem.model.network.layers import GatedMLP, KernelModule, Linear, RMSNorm
from tandem.model.network.mla import MLA


class GroupedAttention(KernelModule):
    """Grouped-query attention as in Llama. A token's cache entry is [rotated keys, values] of G
    heads."""

    def __init__(self, config: EagleConfig, dim_in: int) -> None:
        super().__init__()
        raw_config = config.raw_config
        width = config.raw_config.head_width
        self._num_heads = raw_config.num_attention_heads
        self._scale = width**-0.5
        num_q = raw_config.num_attention_heads * width
        num_kv = raw_config.num_kv_heads * width
        self.q_proj = Linear(dim_in, num_q)
        self.k_proj = Linear(dim_in, num_kv)
        self.v_proj = Linear(dim_in, num_kv)
        self.o_proj = Linear(num_q, config.model.hidden_size)

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        super().process_weights_after_loading(kernels)
        weights = self.k_proj.weight.data, self.v_proj.weight.data
        self._num_kv = 2 * self.k_proj.num_out
        self._kv = kernels.pack(torch.cat(weights))
        del self.k_proj, self.v_proj

    def forward(self, x_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> Tensor:
        """Return the attention output [X, D]; writes the cache entries of this pass."""
        self.write_cache(x_XD=x_XD, batch=batch, cache=cache, angles=angles)
        q_XHK = self.q_proj(x_XD).unflatten(1, (self._num_heads, -1))
        attn = self._attention(batch, cache, angles)
        out_XHK = self.kernels.gqa_attend(q_XHK, attn, batch.context_lens_BQ)
        y_XD: Tensor = self.o_proj(out_XHK.flatten(1))
        return y_XD

    def write_cache(self, x_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> None:
        kv_XL = self.kernels.linear(x_XD, self._kv, self._num_kv)
        attn = self._attention(batch, cache, angles)
        self.kernels.write_gqa_cache(kv_XL, attn, batch.write_slots_BQ.flatten())

    def _attention(self, batch: Batch, cache: Tensor, angles: RopeCosSin) -> AttentionMetadata:
        cos, sin = angles
        return AttentionMetadata(
            cos=cos,
            sin=sin,
            is_interleaved=False,
            cache=cache,
            page_table_BP=batch.page_table_BP,
            scale=self._scale,
            bits_BQ=batch.bits_BQ,
        )


class MidLayer(nn.Module):
    """Attention over ``dim_in`` values, then a dense MLP. EAGLE-3 adds two norms before them.

    ``mlp`` is None on ranks that only write cache entries.
    """

    def __init__(self, config: EagleConfig, dim_in: int, has_norms: bool) -> None:
        super().__init__()
        model = config.model
        dim = config.model.hidden_size
        eps = config.model.rms_norm_eps
        is_grouped = config.raw_config.num_kv_heads > 0
        self.self_attn = GroupedAttention(config, dim_in) if is_grouped else MLA(model, dim_in)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp: nn.Module | None = GatedMLP(dim, config.raw_config.intermediate_size)
        if has_norms:
            self.input_layernorm = RMSNorm(dim, eps)
            self.hidden_norm = RMSNorm(dim, eps)

    def forward(
        self, x_XD: Tensor, before_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin
    ) -> Tensor:
        """Return s + mlp(norm(s)), where s is ``before_XD`` plus the attention output of
        ``x_XD``."""
        attended_XD = self.self_attn(x_XD, batch, cache, angles)
        before_XD, normed_XD = self.post_attention_layernorm.add(before_XD, attended_XD)
        assert self.mlp is not None, "this layer only writes cache entries and has no MLP"
        after_XD: Tensor = before_XD + self.mlp(normed_XD)
        return after_XD


class EagleLayer(nn.Module):
    """The EAGLE-1 layer: fc(embedding, feature), then attention and MLP, which yield the next
    feature.

    Attributes:
        embed_tokens: The head's own embedding. None: the main model's is used.
        lm_head: The head's own output matrix. None: the main model's is used.
        column_V: Index of each token's logit among the U outputs of ``lm_head``. U for tokens
            outside the draft vocabulary. None if both vocabularies are the same.
    """

    input_width_factor, has_norms = 1, False
    """Width of the attention's input divided by the hidden size, and whether ``MidLayer`` has the
    two additional norms of EAGLE-3."""

    def __init__(self, config: EagleConfig, tensor_names: set[str]) -> None:
        """Create the parameters; ``tensor_names`` are the tensors in the head's file."""
        super().__init__()
        model = config.model
        dim = config.model.hidden_size
        self.config = config
        self.fc = Linear((len(config.taps) or 2) * dim, dim)
        self.fc_bias = nn.Parameter(torch.empty(dim)) if "fc_bias" in tensor_names else None
        has_own = "embed_tokens.weight" in tensor_names
        self.embed_tokens = nn.Embedding(model.vocab_size, dim) if has_own else None
        self.midlayer = MidLayer(config, self.input_width_factor * dim, self.has_norms)
        self.lm_head = (
            Linear(dim, config.raw_config.num_outputs) if "lm_head.weight" in tensor_names else None
        )
        self.column_V: Tensor | None = None

    def project_inputs(self, embedding_XD: Tensor, features_XF: Tensor) -> Tensor:
        """Return the input of the layer. The embedding comes first in the concatenation."""
        z_XD: Tensor = self.fc(torch.cat((embedding_XD, features_XF), -1))
        return z_XD if self.fc_bias is None else z_XD + self.fc_bias

    def attention_inputs(self, z_XD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the attention and the residual that its output is added to."""
        return z_XD, z_XD

    def write_cache(self, z_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> None:
        """Write cache entries without computing an output."""
        self.midlayer.self_attn.write_cache(
            x_XD=self.attention_inputs(z_XD)[0], batch=batch, cache=cache, angles=angles
        )

    def predict(self, z_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> Tensor:
        """Return the hidden state [X, D] that predicts the next token. Later passes use it in place
        of the main model's features."""
        hidden_XD: Tensor = self.midlayer(*self.attention_inputs(z_XD), batch, cache, angles)
        return hidden_XD

    def logits(self, hidden_XD: Tensor, shared: Linear) -> Tensor:
        """Return raw fp32 logits [X, V] of the head's own output matrix, or of ``shared`` if it has
        none."""
        logits_XU: Tensor = (self.lm_head or shared)(hidden_XD, in_fp32=True)
        if self.column_V is None:
            return logits_XU
        return F.pad(logits_XU, (0, 1), value=float("-inf")).index_select(1, self.column_V)


class Eagle3Layer(EagleLayer):
    """The EAGLE-3 layer: fc reduces the features of several layers to one. In later passes, the
    layer's own output takes the place of that feature, without fc."""

    input_width_factor, has_norms = 2, True

    def __init__(self, config: EagleConfig, tensor_names: set[str]) -> None:
        super().__init__(config, tensor_names)
        self.norm = RMSNorm(config.model.hidden_size, config.model.rms_norm_eps)

    def project_inputs(self, embedding_XD: Tensor, features_XF: Tensor) -> Tensor:
        is_own = features_XF.shape[-1] == embedding_XD.shape[-1]
        return torch.cat((embedding_XD, features_XF if is_own else self.fc(features_XF)), -1)

    def attention_inputs(self, z_XD: Tensor) -> tuple[Tensor, Tensor]:
        embedding_XD, hidden_XD = z_XD.chunk(2, -1)
        normed_XD = self.midlayer.hidden_norm(hidden_XD)
        x_XD = torch.cat((self.midlayer.input_layernorm(embedding_XD), normed_XD), -1)
        return (
            x_XD,
            normed_XD if self.config.raw_config.norm_before_residual else hidden_XD.contiguous(),
        )

    def predict(self, z_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> Tensor:
        after_XD = super().predict(z_XD=z_XD, batch=batch, cache=cache, angles=angles)
        return self.norm(after_XD) if self.config.raw_config.norm_output else after_XD

    def logits(self, hidden_XD: Tensor, shared: Linear) -> Tensor:
        normed_XD = hidden_XD if self.config.raw_config.norm_output else self.norm(hidden_XD)
        return super().logits(normed_XD, shared)
