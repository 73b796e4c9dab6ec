"""Trainable EAGLE heads, equivalent to model/drafters/eagle_layer.py.

Parameters have the names of EAGLE's authors. Shapes: B windows, T tokens, R rows, D hidden,
F features, H heads, V vocabulary, U draft vocabulary of an EAGLE-3 head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import Network
from training.network import MLP, KeyValue, RMSNorm, attend_causal, attend_unrolled, rotate

KEY_SCALE, OUTPUT_SCALE = 1.2, 3.0
"""Initial scales of the keys and outputs of EAGLE-3's attention (Attention.attend_to_self)."""


@dataclass(frozen=True)
class HeadConfig:
    """Architecture of a head; field names as in config.json. ``has_taps`` selects EAGLE-3."""

    hidden_size: int
    vocab_size: int
    has_taps: bool
    intermediate_size: int = 512
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    draft_vocab_size: int = 1536
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class Attention(nn.Module):
    """Llama attention over the unrolled steps of the training-time test.

    A row sees step 0 of all rows up to its position, and only its own entries of later steps.
    """

    def __init__(self, c: HeadConfig, dim_in: int) -> None:
        super().__init__()
        self.heads, self.groups = c.num_attention_heads, c.num_key_value_heads
        self.q_proj = nn.Linear(dim_in, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(dim_in, self.groups * c.head_dim, bias=False)
        self.v_proj = nn.Linear(dim_in, self.groups * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)

    def attend_to_self(self) -> None:
        """Initialise the first query head of each group as its key, so rows attend to themselves.

        The token's embedding enters EAGLE-3's layer through attention only. Without this
        initialisation, training takes long to find it.
        """
        by_group = self.q_proj.weight.data.unflatten(
            0, (self.groups, self.heads // self.groups, -1)
        )
        by_group[:, 0] *= KEY_SCALE
        self.k_proj.weight.data = by_group[:, 0].flatten(0, 1).clone()
        self.o_proj.weight.data *= OUTPUT_SCALE

    def forward(self, x: Tensor, table: Tensor, depths: list[KeyValue]) -> Tensor:
        q = self.q_proj(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(2, (self.groups, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(2, (self.groups, -1)).transpose(1, 2)
        k, v = (
            one.repeat_interleave(self.heads // self.groups, 1) for one in (rotate(k, table), v)
        )
        q = rotate(q, table)
        depths.append((k, v))
        out = attend_causal(q, k, v) if len(depths) == 1 else attend_unrolled(q, depths)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MidLayer(nn.Module):
    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        dim, eps = c.hidden_size, c.rms_norm_eps
        self.self_attn = Attention(c, (1 + c.has_taps) * dim)
        self.mlp = MLP(dim, c.intermediate_size)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        if c.has_taps:
            self.input_layernorm, self.hidden_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)


class Head(nn.Module):
    """EAGLE head: input projection, one layer and, in EAGLE-3, a language-model head.

    Attributes:
        ids_U: Tokens of EAGLE-3's draft vocabulary, in ascending order.
        scale_F: Factors of the input features, 1 unless ``rescale`` was called.
    """

    angles: Tensor
    ids_U: Tensor
    scale_F: Tensor

    def __init__(self, c: HeadConfig, network: Network, ids_U: Tensor, seed: int) -> None:
        super().__init__()
        self.config = c
        self.fc = nn.Linear(
            (3 if c.has_taps else 2) * c.hidden_size, c.hidden_size, bias=not c.has_taps
        )
        self.midlayer = MidLayer(c)
        if c.has_taps:
            self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.lm_head = nn.Linear(c.hidden_size, len(ids_U), bias=False)
        pairs = torch.arange(0, c.head_dim, 2) / c.head_dim
        angles = torch.arange(2048)[:, None] * c.rope_theta**-pairs
        self.register_buffer("angles", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.register_buffer("ids_U", ids_U, persistent=False)
        self.register_buffer("scale_F", torch.ones(self.fc.in_features), persistent=False)
        self._initialise(network, torch.Generator().manual_seed(seed))

    def _initialise(self, network: Network, generator: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                std = weight.shape[-1] ** -0.5 * (
                    0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                nn.init.normal_(weight, std=std, generator=generator)
        if self.config.has_taps:
            self.lm_head.weight.data = network.lm_head.weight.data[self.ids_U].clone()
            self.norm.weight.data = network.model.norm.weight.data.clone()
            self.midlayer.self_attn.attend_to_self()
        else:
            nn.init.zeros_(self.fc.bias)

    def rescale(self, features: Tensor) -> None:
        """Scale each tap of the input to a root mean square of 1, as measured on ``features``.

        The inputs of layers may be dozens of times larger than the layers' outputs, so that ``fc``
        would dominate everything else. A saved checkpoint has the factors in the columns of
        ``fc``.
        """
        squares = features.unflatten(-1, (-1, self.config.hidden_size)).square().mean((0, 1, 3))
        self.scale_F = squares.rsqrt().repeat_interleave(self.config.hidden_size)

    def unrolled(
        self, network: Network, tokens: Tensor, features: Tensor, num_steps: int
    ) -> list[Tensor]:
        """Return the hidden states [B, R, D] of each step, for R = T - num_steps rows.

        Row i of step k reads token i + 1 + k. Step 0 also reads the row's features, and later
        steps read the row's previous hidden state.
        """
        rows = tokens.shape[1] - num_steps
        hidden, made, depths = features[:, :rows], [], list[KeyValue]()
        if self.config.has_taps:
            hidden = hidden * self.scale_F
        for k in range(num_steps):
            embedding = network.model.embed_tokens(tokens[:, k + 1 : k + 1 + rows])
            hidden = self._step(embedding, hidden, self.angles[:, k : k + rows], depths)
            made.append(hidden)
        return made

    def _step(
        self, embedding: Tensor, hidden: Tensor, table: Tensor, depths: list[KeyValue]
    ) -> Tensor:
        layer = self.midlayer
        if self.config.has_taps:
            before = hidden if depths else self.fc(hidden)
            x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(before)], -1)
        else:
            x = before = self.fc(torch.cat([embedding, hidden], -1))
        before = before + layer.self_attn(x, table, depths)
        out, _ = layer.mlp(layer.post_attention_layernorm(before))
        return before + out

    def logits(self, network: Network, hidden: Tensor) -> Tensor:
        """Return logits [.., U] of EAGLE-3's head, otherwise [.., V] of the network's head."""
        if self.config.has_taps:
            return self.lm_head(self.norm(hidden))
        return F.linear(hidden, network.lm_head.weight)
