"""The complete trainable model: trunk, language-model head and MTP layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.network import DecoderLayer, KeyValue, NetworkConfig, RMSNorm


class SharedHead(nn.Module):
    """Norm before the language-model head, which the MTP layer shares with the trunk."""

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
        """Project the normed embedding and hidden state, [B, T, D] each, to [B, T, D]."""
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
    """Output of the trunk.

    Attributes:
        hidden: Hidden states [B, T, D] after the final norm.
        logits: Logits [B, T, V].
        loads: Tokens per expert [E] of each MoE layer.
        tapped: Inputs [B, T, D] of the layers given as ``taps``.
    """

    hidden: Tensor
    logits: Tensor
    loads: list[Tensor]
    tapped: list[Tensor]


class Network(nn.Module):
    """DeepSeek-V3 with one MTP layer, which is unrolled over its own output."""

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
        """Run the trunk on token ids [B, T] and record the inputs of the layers ``taps``."""
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
        """Unroll the MTP layer as in inference, with true tokens in place of its drafts.

        There are R = T - depth rows. Row i of depth k reads token i + k and predicts token
        i + k + 1.

        Args:
            tokens: Token ids [B, T].
            hidden: Hidden states [B, T, D] of the trunk.
            depth: Number of steps.

        Returns:
            Logits [B, R, V] of each depth, and the total tokens per expert [E].
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
