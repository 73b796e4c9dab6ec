"""The whole trainable model: trunk, language-model head and the MTP layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.network import DecoderLayer, KeyValue, NetworkConfig, RMSNorm


class SharedHead(nn.Module):
    """Norm in front of the head that the MTP layer shares with the trunk."""

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """Decoder layer that mixes the next token's embedding with the previous hidden state."""

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__(c, dense=False)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.shared_head = SharedHead(c)

    def mix(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Two [B, T, D] -> [B, T, D]; the embedding comes first."""
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))


class Trunk(nn.Module):
    """Embedding, decoder layers (the MTP layer is the last one) and the final norm."""

    def __init__(self, c: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        main = [DecoderLayer(c, i < c.first_k_dense_replace) for i in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList([*main, MtpLayer(c)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


@dataclass
class TrunkOutput:
    """hidden [B, T, D] after the final norm, logits [B, T, V], loads [layers, E] in tokens;
    ``tapped`` [B, T, D] each is what entered some layers."""

    hidden: Tensor
    logits: Tensor
    loads: list[Tensor]
    tapped: list[Tensor]


class Network(nn.Module):
    """DeepSeek-V3 with one MTP layer that is unrolled over its own output."""

    angles: Tensor

    def __init__(self, config: NetworkConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        pairs = torch.arange(0, config.qk_rope_head_dim, 2) / config.qk_rope_head_dim
        angles = torch.arange(config.max_position_embeddings)[:, None] * config.rope_theta**-pairs
        self.register_buffer("angles", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                continue
            std = weight.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std *= 0.2
            elif name == "lm_head.weight":
                std = 0.02
            elif name == "model.embed_tokens.weight":
                std = 0.5
            nn.init.normal_(weight, std=std, generator=generator)

    @property
    def mtp(self) -> MtpLayer:
        """The MTP layer."""
        layer = self.model.layers[-1]
        assert isinstance(layer, MtpLayer)
        return layer

    def forward(self, tokens: Tensor, taps: Sequence[int] = ()) -> TrunkOutput:
        """Runs the trunk over token ids [B, T], and keeps what enters the layers ``taps``."""
        x = self.model.embed_tokens(tokens)
        table = self.angles[:, : tokens.shape[1]]
        loads, tapped = [], []
        for i, layer in enumerate(self.model.layers[:-1]):
            if i in taps:
                tapped.append(x)
            x, load = layer(x, table)
            if load is not None:
                loads.append(load)
        hidden = self.model.norm(x)
        return TrunkOutput(hidden, self.lm_head(hidden), loads, tapped)

    def draft(self, tokens: Tensor, hidden: Tensor, depth: int) -> tuple[list[Tensor], Tensor]:
        """Unrolls the MTP layer as inference does, with true tokens in place of its drafts.

        tokens [B, T] and hidden [B, T, D] of the trunk give R = T - depth rows. Row i of depth
        k takes token i + k and predicts token i + k + 1. Returns logits [B, R, V] for every
        depth, and the summed expert load [E] in tokens.
        """
        rows = tokens.shape[1] - depth
        state = hidden[:, :rows]
        depths: list[KeyValue] = []
        logits, loads = [], []
        for step in range(1, depth + 1):
            x = self.mtp.mix(self.model.embed_tokens(tokens[:, step : step + rows]), state)
            x, load = self.mtp(x, self.angles[:, step : step + rows], depths)
            state = self.mtp.shared_head.norm(x)
            logits.append(self.lm_head(state))
            loads.append(load)
        return logits, torch.stack(loads).sum(0)
