"""The DeepSeek-V3 network. Parameters carry the checkpoint's names (spec §2).

Shape legend: B sequences, Q query rows, D hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn

from model.batch import Batch
from model.cache import MAIN, MTP, CacheGroup, Caches
from model.config import ModelConfig
from model.layers import GatedMLP, RMSNorm, Rope, linear
from model.mla import MLA
from model.moe import MoE


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, moe: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if moe else GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_BQD: Tensor, batch: Batch, cache: Tensor, rope: Rope) -> Tensor:
        x_BQD = x_BQD + self.self_attn(self.input_layernorm(x_BQD), batch, cache, rope)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class SharedHead(nn.Module):
    """The MTP layer's own final norm; its ``head`` is the main model's lm_head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """Row i: (embedding of token i+1, main hidden i) -> hidden that predicts token i+2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, moe=True)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def predict(
        self, embedding_BQD: Tensor, hidden_BQD: Tensor, batch: Batch, cache: Tensor, rope: Rope
    ) -> Tensor:
        """Normed MTP hidden [B, Q, D] (spec §5: embedding first, post-norm hidden)."""
        z = self.eh_proj(torch.cat((self.enorm(embedding_BQD), self.hnorm(hidden_BQD)), -1))
        return self.shared_head.norm(self(z, batch, cache, rope))


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig, num_mtp_layers: int) -> None:
        super().__init__()
        # Given weights skip the random ones, which on the meta device cost seconds of imports.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=True)
        main = [
            DecoderLayer(config, moe=config.is_moe_layer(i))
            for i in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(main + [MtpLayer(config) for _ in range(num_mtp_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekV3(nn.Module):
    """Main model and, with ``with_mtp``, its first MTP layer at index num_hidden_layers."""

    def __init__(self, config: ModelConfig, *, with_mtp: bool) -> None:
        super().__init__()
        self.config = config
        self.has_mtp = with_mtp
        self.model = Trunk(config, int(with_mtp))
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.rope = Rope(config)

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The caches a rank that serves this model keeps, in wire order."""
        config = self.config
        main = CacheGroup(MAIN, config.num_hidden_layers, config.latent_dim)
        return (main, CacheGroup(MTP, 1, config.latent_dim)) if self.has_mtp else (main,)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Hidden states [B, Q, D] after ``model.norm``: what the head and the drafter read."""
        x_BQD = self.model.embed_tokens(batch.token_ids_BQ)
        for layer, cache in zip(self.model.layers, caches[MAIN], strict=False):
            x_BQD = layer(x_BQD, batch, cache, self.rope)
        return self.model.norm(x_BQD)

    def forward_mtp(self, batch: Batch, hidden_BQD: Tensor, caches: Caches) -> Tensor:
        """One pass of the MTP layer: normed hidden states [B, Q, D]."""
        assert self.has_mtp, "this checkpoint has no MTP layer"
        layer = self.model.layers[self.config.num_hidden_layers]
        assert isinstance(layer, MtpLayer)
        embedding = self.model.embed_tokens(batch.token_ids_BQ)
        return layer.predict(embedding, hidden_BQD, batch, caches[MTP][0], self.rope)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw fp32 logits [..., V]."""
        return self.lm_head(hidden).float()
