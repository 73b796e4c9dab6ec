"""DeepSeek's multi-token-prediction layer as a drafter, applied repeatedly to its own output (arXiv
2412.19437).

Shape legend: B rows, M tokens pending at most, N drafts, D hidden, X rows of a pass. P pages. In
prefill: T packed tokens, G segments.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape
from tandem.core.pages import DUMMY_PAGE
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.checkpoint.weights import Checkpoint, load_mtp
from tandem.model.drafters.base import UNKNOWN_TOKEN, DraftContext, Drafter, Drafts, Emitted
from tandem.model.drafters.mtp_rows import MtpCatchUp, MtpRows, first_pass_batch, later_slots
from tandem.model.kernels.base import Kernels, RopeCosSin
from tandem.model.network.batch import Batch, physical_slots
from tandem.model.network.cache import MTP, CacheGroup, Caches
from tandem.model.network.deepseek import DecoderLayer, DeepseekV3
from tandem.model.network.dispatch.base import Dispatch
from tandem.model.network.layers import Linear, RMSNorm, process_weights_after_loading


class MtpLayer(DecoderLayer):
    """Multi-token-prediction layer.

    Row i takes (embedding of token i + 1, hidden state i) and returns the hidden state that
    predicts token i + 2.
    """

    def __init__(self, config: ModelConfig, dispatch: Dispatch, number: int = 0) -> None:
        super().__init__(config, dispatch, config.moe_layer(config.num_hidden_layers + number))
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        # The layer has its own final norm, but uses the output matrix of the main model.
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def project_inputs(self, embedding_XD: Tensor, hidden_XD: Tensor) -> Tensor:
        """Return the input of the layer, a projection of [embedding, hidden state]. The hidden
        state is the one after the main model's final norm."""
        z_XD: Tensor = self.eh_proj(
            torch.cat((self.enorm(embedding_XD), self.hnorm(hidden_XD)), -1)
        )
        return z_XD

    def write_cache(self, z_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> None:
        """Write cache entries without computing an output. This suffices, because the entries of a
        single layer depend only on its input."""
        self.self_attn.write_cache(
            x_XD=self.input_layernorm(z_XD), batch=batch, cache=cache, angles=angles
        )

    def predict(self, z_XD: Tensor, batch: Batch, cache: Tensor, angles: RopeCosSin) -> Tensor:
        """Return the normalised hidden state [X, D] of the layer."""
        norm = self.shared_head["norm"]
        assert isinstance(norm, RMSNorm)
        return norm.add(*self(z_XD, None, batch, cache, angles))[1]


class MtpDrafter(Drafter):
    """A drafter that applies one MTP layer repeatedly.

    Pass 1 writes the cache entries of the pending tokens from the main model's hidden states. Its
    last row, the head row, yields draft 1. Passes 2..n run the head row alone, on the layer's own
    normalised output. Outputs of other rows are not computed.

    Embedding, output matrix and RoPE tables are those of the main model.
    """

    name = "mtp"
    group = MTP
    lag = 1
    """Position of a token in the text minus the slot of its cache entry."""

    def __init__(self, network: DeepseekV3, layer: MtpLayer) -> None:
        self._network = network
        self._layer = layer
        self._rope = network.rope
        self.num_features = network.config.hidden_size
        self.uses_collectives = network.dispatch.placement is not None
        self.cache_groups = (CacheGroup(MTP, 1, network.config.latent_dim, lag=1),)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        """Load the checkpoint's first MTP layer. Raises ValueError as ``load_weights`` does."""
        with torch.device("meta"):
            layer = MtpLayer(checkpoint.config, network.dispatch)
        load_mtp(layer, checkpoint, 0, is_whole=checkpoint.may_draft)
        return cls(network, layer.eval())

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        process_weights_after_loading(self._layer, kernels)

    def catch_up(self, max_depth: int) -> MtpCatchUp:
        return MtpCatchUp(max_depth)

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> MtpRows:
        width = MtpCatchUp(max_depth).max_width
        tokens_1M = torch.zeros(1, width, dtype=torch.int64)
        tokens_1M[0, 0] = text[-1]
        return MtpRows(
            tokens_1M,
            F.pad(features_F[None, None], (0, 0, 0, width - 1)),
            num_pending_B=torch.tensor([1]),
            is_first_unknown_B=torch.tensor([not has_features]),
        )

    def forward(
        self, batch: Batch, hidden_XD: Tensor, caches: Caches, angles: RopeCosSin | None = None
    ) -> Tensor:
        """Run one pass over rows that pair a token with the hidden state before it. Return the
        normalised hidden states [X, D]."""
        z_XD = self._project_inputs(batch, hidden_XD)
        angles = angles or self._angles(batch)
        return self._layer.predict(
            z_XD=z_XD, batch=batch, cache=caches[self.group][-1], angles=angles
        )

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        """Write the cache entries of a packed batch. Row i pairs hidden state i with token i + 1.

        If the token after a segment is unknown, the segment's last row writes no entry. Pass 1
        writes that entry once the token is known.
        """
        batch = shift_tokens(shift_positions(batch), next_GK[:, 0])
        z_XD = self._project_inputs(replace_unknown(batch), features_1TF[0])
        self._layer.write_cache(
            z_XD=z_XD, batch=batch, cache=caches[self.group][0], angles=self._angles(batch)
        )

    def draft(
        self,
        state: MtpRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        first_BD = self._first_pass(
            state=state,
            context=context,
            draft_shape=draft_shape,
            catch_up_width=catch_up_width,
            caches=caches,
        )
        if first_BD is None:
            return Drafts(state.tokens_BM[:, :0])
        head_BD = first_BD
        later = self._later_passes(context, draft_shape.depth - 1, caches[self.group][0].shape[1])

        def logits(i: int, last_B1: Tensor) -> Tensor:
            nonlocal head_BD
            if i:
                batch, angles = later[i - 1]
                batch = replace(batch, token_ids_BQ=last_B1)
                head_BD = self.forward(batch=batch, hidden_XD=head_BD, caches=caches, angles=angles)
            return self._logits(head_BD)

        return context.draft_chain(draft_shape.depth, logits)

    def commit(self, state: MtpRows, emitted: Emitted, catch_up_width: int) -> MtpRows:
        """Queue the emitted tokens for the next pass 1.

        If this step ran no pass 1, it had no drafts and emitted one token, which joins those
        already pending.
        """
        if catch_up_width:
            padding = state.tokens_BM.shape[1] - emitted.tokens_BE.shape[1]
            return MtpRows(
                tokens_BM=F.pad(emitted.tokens_BE, (0, padding)),
                hidden_BMD=F.pad(emitted.features_BEF, (0, 0, 0, padding)),
                num_pending_B=emitted.num_B,
                is_first_unknown_B=torch.zeros_like(state.is_first_unknown_B),
            )
        at_B1 = state.num_pending_B.unsqueeze(1)
        at_B1D = at_B1.unsqueeze(2).expand_as(emitted.features_BEF)
        return MtpRows(
            tokens_BM=state.tokens_BM.scatter(1, at_B1, emitted.tokens_BE),
            hidden_BMD=state.hidden_BMD.scatter(1, at_B1D, emitted.features_BEF),
            num_pending_B=state.num_pending_B + 1,
            is_first_unknown_B=state.is_first_unknown_B,
        )

    def _first_pass(
        self,
        state: MtpRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Tensor | None:
        """Run pass 1 and return the hidden state that predicts draft 1, or None if there are no
        drafts."""
        if catch_up_width == 0:
            return None
        cache = caches[self.group][0]
        batch = first_pass_batch(
            state=state, context=context, width=catch_up_width, page_size=cache.shape[1]
        )
        z_XD = self._project_inputs(batch, state.hidden_BMD[:, :catch_up_width].flatten(0, 1))
        cos, sin = self._angles(batch)
        self._layer.write_cache(z_XD=z_XD, batch=batch, cache=cache, angles=(cos, sin))
        if draft_shape.depth == 0:
            return None
        at_B = torch.arange(len(state.tokens_BM), device=z_XD.device) * catch_up_width
        at_B = at_B + (state.num_pending_B - 1)
        at_head = head_batch(context, batch, at_B), cache, (cos[at_B], sin[at_B])
        return self._layer.predict(z_XD[at_B], *at_head)

    def _project_inputs(self, batch: Batch, hidden_XD: Tensor) -> Tensor:
        return self._layer.project_inputs(self._embedded(batch), hidden_XD)

    def _embedded(self, batch: Batch) -> Tensor:
        embedding_XD: Tensor = self._network.model.embed_tokens(batch.token_ids_BQ.flatten())
        return embedding_XD

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._network.logits(hidden)

    def _angles(self, batch: Batch) -> RopeCosSin:
        return self._rope.at(batch.positions_BQ.flatten())

    def _later_passes(
        self, context: DraftContext, num_passes: int, page_size: int
    ) -> list[tuple[Batch, RopeCosSin]]:
        """Prepare the batch and RoPE angles of each pass after the first. Only the tokens are set
        later, because nothing else depends on the drafts."""
        if num_passes == 0:
            return []
        slots_NB = later_slots(context.num_known_B, num_passes, self.lag)
        places_BN = physical_slots(
            page_table_BP=context.page_table_BP,
            slots_BQ=slots_NB.t(),
            keep_BQ=None,
            page_size=page_size,
        )
        places_NB1 = places_BN.t().contiguous().unsqueeze(2)
        context_NB1 = (slots_NB + 1).unsqueeze(2)
        cos, sin = self._rope.at((context_NB1 if self.lag else slots_NB).flatten())
        angles = zip(cos.chunk(num_passes), sin.chunk(num_passes), strict=True)
        real_B1 = context.real_B.unsqueeze(1)
        table_BP = context.page_table_BP
        batches = (
            Batch(
                token_ids_BQ=at,
                positions_BQ=at if self.lag else at - 1,
                write_slots_BQ=places,
                context_lens_BQ=at,
                page_table_BP=table_BP,
                real_BQ=real_B1,
            )
            for at, places in zip(context_NB1, places_NB1, strict=True)
        )
        return [*zip(batches, angles, strict=True)]


def head_batch(context: DraftContext, batch: Batch, at_B: Tensor) -> Batch:
    """Return the batch of the head rows: for each sequence, the row ``at_B`` of pass 1, which has
    its last known token."""
    positions_B1 = (context.num_known_B - 1).unsqueeze(1)
    places_B1 = batch.write_slots_BQ.flatten()[at_B].unsqueeze(1)
    own = positions_B1, positions_B1, places_B1, positions_B1
    return Batch(*own, batch.page_table_BP, real_BQ=context.real_B.unsqueeze(1))


def shift_positions(batch: Batch) -> Batch:
    """Return ``batch`` with each row's position moved to that of the next token."""
    return replace(batch, positions_BQ=batch.positions_BQ + 1)


def replace_unknown(batch: Batch) -> Batch:
    """Return ``batch`` with a valid token id in place of UNKNOWN_TOKEN."""
    return replace(batch, token_ids_BQ=batch.token_ids_BQ.clamp(min=0))


def shift_tokens(batch: Batch, next_G: Tensor) -> Batch:
    """Replace each token of a packed batch by the next token of its segment.

    ``next_G`` is the token after the last one of each segment. If it is UNKNOWN_TOKEN, the
    segment's last row writes no cache entry.
    """
    assert batch.segments is not None, "shift_tokens needs a prefill batch"
    last_G = batch.segments.ends_G - 1
    next_ids_1T = batch.token_ids_BQ.roll(-1, 1)
    next_ids_1T[0, last_G] = next_G
    is_known_1T = next_ids_1T != UNKNOWN_TOKEN
    return replace(
        batch,
        token_ids_BQ=next_ids_1T,
        write_slots_BQ=batch.write_slots_BQ.where(is_known_1T, DUMMY_PAGE),
    )
