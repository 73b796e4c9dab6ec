"""The DeepSeek-V3 network (arXiv:2412.19437). Parameters have the names of the checkpoint.

Shape legend: B sequences, Q query rows, X = B * Q, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tandem.model.checkpoint.config import ModelConfig
from tandem.model.kernels.base import BranchOutput, RopeCosSin
from tandem.model.network.batch import Batch
from tandem.model.network.cache import MAIN, Caches
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import GatedMLP, Linear, RMSNorm, Rope
from tandem.model.network.mla import MLA
from tandem.model.network.moe import MoE


class DecoderLayer(nn.Module):
    """Transformer layer. ``moe_layer`` is its index among the MoE layers, None if it is dense."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch, moe_layer: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module
        if moe_layer is None:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoE(config, dispatch, moe_layer)

    def forward(
        self,
        x_XD: Tensor,
        branch: BranchOutput | None,
        batch: Batch,
        cache: Tensor,
        angles: RopeCosSin,
    ) -> tuple[Tensor, BranchOutput]:
        """Apply the layer to ``x_XD + branch``; ``branch`` is the MLP output of the layer before.

        Returns:
            The residual stream and the layer's MLP output. Their sum is the layer's output, which
            the next norm computes.
        """
        x_XD, normed_XD = self.input_layernorm.add(x_XD, branch)
        attended_XD = self.self_attn(normed_XD, batch, cache, angles)
        x_XD, normed_XD = self.post_attention_layernorm.add(x_XD, attended_XD)
        real_X = None if batch.real_BQ is None else batch.real_BQ.flatten()
        return x_XD, self.mlp(normed_XD, real_X)


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig, dispatch: Dispatch) -> None:
        super().__init__()
        # A given weight skips random initialisation, whose imports take seconds on meta devices.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=True)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dispatch, config.moe_layer(i))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekV3(nn.Module):
    """The main model. Drafters have separate weights and share its ``dispatch``."""

    def __init__(self, config: ModelConfig, dispatch: Dispatch) -> None:
        super().__init__()
        self.config = config
        self.dispatch = dispatch
        self.model = Trunk(config, dispatch)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.rope = Rope(config)

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Compute the hidden states [B, Q, D] after ``model.norm``, which ``logits`` reads."""
        return self.forward_with_taps(batch, caches, ())[0]

    def forward_with_taps(
        self, batch: Batch, caches: Caches, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute the hidden states [B, Q, D] and a drafter's features [B, Q, F].

        The features are the concatenated inputs of the layers ``taps``, or the hidden states if
        ``taps`` is empty.
        """
        x_XD = self.model.embed_tokens(batch.token_ids_BQ.flatten())
        branch = None
        angles = self.rope.at(batch.positions_BQ.flatten())
        found = []
        for i, (layer, cache) in enumerate(zip(self.model.layers, caches[MAIN], strict=True)):
            if i in taps:
                x_XD = self.model.norm.add(x_XD, branch)[0]
                branch = None
                found.append(x_XD)
            x_XD, branch = layer(x_XD, branch, batch, cache, angles)
        shape = batch.token_ids_BQ.shape
        hidden_BQD = self.model.norm.add(x_XD, branch)[1].view(*shape, -1)
        return hidden_BQD, torch.cat(found, -1).view(*shape, -1) if found else hidden_BQD

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute raw fp32 logits [..., V]."""
        logits: Tensor = self.lm_head(hidden.flatten(0, -2), in_fp32=True)
        return logits.unflatten(0, hidden.shape[:-1])
