"""DeepSeek's multi-token prediction with one module per draft (DeepSeek-V3, arXiv 2412.19437, 2.2).

Module k takes the output of module k - 1 for the same row, and the token k positions after it.

Shape legend: B rows, K modules, H = K - 1 rows of history, D hidden. A pending tokens that pass 1
catches up with, W = H + A rows of a window, T = W + H tokens, X = B * W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape
from tandem.model.checkpoint.weights import Checkpoint, load_mtp, num_mtp_layers
from tandem.model.drafters.base import DraftContext, Drafts, Emitted
from tandem.model.drafters.mtp import (
    MtpDrafter,
    MtpLayer,
    head_batch,
    replace_unknown,
    shift_positions,
    shift_tokens,
)
from tandem.model.drafters.mtp_rows import MtpRows
from tandem.model.kernels.base import Kernels
from tandem.model.network.batch import Batch, physical_slots
from tandem.model.network.cache import MTP, CacheGroup, Caches
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.layers import process_weights_after_loading


@dataclass(slots=True)
class PassWindow:
    """The rows of pass 1, padded: slots L-1-H-m .. L-2 for L known tokens, of which m are pending.

    Attributes:
        tokens_BT: Tokens that module 1 reads, followed by all drafts so far.
        hidden_XD: Output of the previous module for each row. For module 1: the hidden state of the
            main model.
        slots_BW: Slot of each row.
        num_real_B: Number of rows that belong to the text, H + m. The last one is the head row.
        is_first_unknown_B: True if the prefill rank has written the entries of the first pending
            row.
        num_drafts: Number of drafts so far.
    """

    tokens_BT: Tensor
    hidden_XD: Tensor
    slots_BW: Tensor
    num_real_B: Tensor
    is_first_unknown_B: Tensor
    num_drafts: int = 0

    @classmethod
    def of(
        cls, state: MtpRows, context: DraftContext, num_history: int, catch_up_width: int
    ) -> Self:
        """Build the window for a step that catches up by ``catch_up_width``."""
        num_real_B = state.num_pending_B + num_history
        width = num_history + catch_up_width
        row_W = torch.arange(width, device=num_real_B.device)
        slots_BW = (context.num_known_B - 1 - num_real_B).unsqueeze(1) + row_W
        tokens_BT = F.pad(state.tokens_BM[:, :width], (0, num_history))
        hidden_XD = state.hidden_BMD[:, :width].flatten(0, 1)
        return cls(tokens_BT, hidden_XD, slots_BW, num_real_B, state.is_first_unknown_B)

    def append_draft(self, token_B1: Tensor) -> None:
        """Append a draft to the tokens of each row."""
        at_B1 = self.num_real_B.unsqueeze(1) + self.num_drafts
        self.tokens_BT = self.tokens_BT.scatter(1, at_B1, token_B1)
        self.num_drafts += 1

    def batch(self, number: int, context: DraftContext, page_size: int) -> Batch:
        """Return the batch of module ``number``, counted from 0.

        A row's entry is written unless the module has already processed the row's token as a known
        token. If it has processed the token only as a draft, the entry is written again.
        """
        row_W = torch.arange(self.slots_BW.shape[1], device=self.slots_BW.device)
        num_known_B1 = (self.num_real_B + min(number, self.num_drafts) - number).unsqueeze(1)
        real_BW = (row_W < num_known_B1) & (self.slots_BW >= 0) & context.real_B.unsqueeze(1)
        num_history = self.tokens_BT.shape[1] - len(row_W)
        keep_BW = real_BW & (
            row_W >= (num_history - number + self.is_first_unknown_B.long()).unsqueeze(1)
        )
        # Rows before the start of the text are padding, but attention needs a slot to read.
        context_BW = (self.slots_BW + 1).clamp(min=1)
        return Batch(
            token_ids_BQ=self.tokens_BT[:, number : number + len(row_W)],
            positions_BQ=context_BW,
            write_slots_BQ=physical_slots(
                page_table_BP=context.page_table_BP,
                slots_BQ=self.slots_BW,
                keep_BQ=keep_BW,
                page_size=page_size,
            ),
            context_lens_BQ=context_BW,
            page_table_BP=context.page_table_BP,
            real_BQ=real_BW,
        )


class VanillaDrafter(MtpDrafter):
    """A drafter with one MTP module per draft; the last module yields all further drafts from its
    own output.

    Pass 1 runs all modules, over the same rows and positions in each. The last module computes an
    output for the head row only. Entries that depend on a draft are written again once the token is
    known. They come after all entries that prefill wrote.
    """

    def __init__(self, network: DeepseekV3, layers: Sequence[MtpLayer]) -> None:
        super().__init__(network, layers[-1])
        self._layers = layers
        self.num_feature_tokens = num = len(layers)
        self._num_history = num - 1
        self.cache_groups = (CacheGroup(MTP, num, network.config.latent_dim, lag=num),)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        """Load one module per draft, or all that the checkpoint has if these are fewer.

        Ranks that never draft skip the experts of the last module, whose output they do not need.
        Raises ValueError as ``load_weights`` does.
        """
        num = min(num_mtp_layers(checkpoint.files, checkpoint.config), spec_config.max_depth)
        with torch.device("meta"):
            layers = [MtpLayer(checkpoint.config, network.dispatch, i) for i in range(num)]
        for i, layer in enumerate(layers):
            load_mtp(layer, checkpoint, i, is_whole=checkpoint.may_draft or i < num - 1)
        return cls(network, [layer.eval() for layer in layers])

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        for layer in self._layers:
            process_weights_after_loading(layer, kernels)

    def init_state(
        self, text: Sequence[int], features_F: Tensor, has_features: bool, max_depth: int
    ) -> MtpRows:
        """Create the state of one row.

        The entries of the first pending row are never written here: prefill has written them, in
        pages that other sequences may share.
        """
        hidden_1KD = features_F.view(1, self.num_feature_tokens, -1)
        rows = super().init_state(
            text=text, features_F=hidden_1KD[0, -1], has_features=False, max_depth=max_depth
        )
        tokens = [0] * self.num_feature_tokens + list(text[:-1])
        tokens_1H = torch.tensor([tokens[-self._num_history :]])
        return prepend_history(
            tokens_BH=tokens_1H,
            hidden_BHD=hidden_1KD[:, :-1],
            rows=rows,
            num_pending=rows.tokens_BM.shape[1],
        )

    def prefill(self, batch: Batch, next_GK: Tensor, features_1TF: Tensor, caches: Caches) -> None:
        """Write the cache entries of a packed batch. Row i of module k pairs token i + k with the
        output of module k-1."""
        batch = shift_positions(batch)
        hidden_TD = features_1TF[0]
        angles = self._angles(batch)
        for i, (layer, cache) in enumerate(zip(self._layers, caches[MTP], strict=True)):
            batch = shift_tokens(batch, next_GK[:, i])
            z_TD = layer.project_inputs(self._embedded(replace_unknown(batch)), hidden_TD)
            if i < self._num_history:
                hidden_TD = layer.predict(z_XD=z_TD, batch=batch, cache=cache, angles=angles)
            else:
                layer.write_cache(z_XD=z_TD, batch=batch, cache=cache, angles=angles)

    def draft(
        self,
        state: MtpRows,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        """Run all modules. Modules that yield no draft in this step only write their cache
        entries."""
        if catch_up_width == 0:
            return Drafts(state.tokens_BM[:, :0])
        num = len(self._layers)
        page_size = caches[MTP][0].shape[1]
        window = PassWindow.of(
            state=state,
            context=context,
            num_history=self._num_history,
            catch_up_width=catch_up_width,
        )
        later = self._later_passes(context, max(0, draft_shape.depth - num), page_size)
        head_BD = state.hidden_BMD[:, 0]

        def logits(i: int, last_B1: Tensor) -> Tensor:
            nonlocal head_BD
            if 0 < i < num:
                window.append_draft(last_B1)
            if i < num:
                head_BD = self._run_module(
                    number=i, window=window, context=context, caches=caches, has_draft=True
                )
            else:
                batch, angles = later[i - num]
                batch = replace(batch, token_ids_BQ=last_B1)
                head_BD = self.forward(batch=batch, hidden_XD=head_BD, caches=caches, angles=angles)
            return self._network.logits(head_BD)

        drafts = context.draft_chain(draft_shape.depth, logits)
        for i in range(draft_shape.depth, num):
            self._run_module(
                number=i, window=window, context=context, caches=caches, has_draft=False
            )
        return drafts

    def commit(self, state: MtpRows, emitted: Emitted, catch_up_width: int) -> MtpRows:
        """Queue the emitted tokens for the next pass 1, after the H rows of history before them."""
        num = self._num_history
        if catch_up_width == 0:
            all_B = state.num_pending_B + num
            after = super().commit(replace(state, num_pending_B=all_B), emitted, 0)
            return replace(after, num_pending_B=state.num_pending_B + 1)
        after = super().commit(state, emitted, catch_up_width)
        row_H = torch.arange(num, device=state.num_pending_B.device)
        at_BH = state.num_pending_B.unsqueeze(1) + row_H
        at_BHD = at_BH.unsqueeze(2).expand(-1, -1, state.hidden_BMD.shape[2])
        history = state.tokens_BM.gather(1, at_BH), state.hidden_BMD.gather(1, at_BHD)
        return prepend_history(*history, after, state.tokens_BM.shape[1] - num)

    def _run_module(
        self,
        number: int,
        window: PassWindow,
        context: DraftContext,
        caches: Caches,
        *,
        has_draft: bool,
    ) -> Tensor:
        """Write a module's cache entries and return its output at the head row. The last module
        skips the output unless ``has_draft``, and its input is returned instead."""
        layer = self._layers[number]
        cache = caches[MTP][number]
        batch = window.batch(number, context, cache.shape[1])
        cos, sin = angles = self._angles(batch)
        z_XD = layer.project_inputs(self._embedded(batch), window.hidden_XD)
        row_B = torch.arange(len(context.real_B), device=z_XD.device)
        at_B = row_B * window.slots_BW.shape[1] + window.num_real_B - 1
        if number < self._num_history:
            window.hidden_XD = layer.predict(z_XD=z_XD, batch=batch, cache=cache, angles=angles)
            return window.hidden_XD[at_B]
        layer.write_cache(z_XD=z_XD, batch=batch, cache=cache, angles=angles)
        if not has_draft:
            return z_XD[at_B]
        at_head = head_batch(context, batch, at_B), cache, (cos[at_B], sin[at_B])
        return layer.predict(z_XD[at_B], *at_head)


def prepend_history(
    tokens_BH: Tensor, hidden_BHD: Tensor, rows: MtpRows, num_pending: int
) -> MtpRows:
    """Return ``rows`` with the given history before the first ``num_pending`` of their pending
    tokens."""
    return replace(
        rows,
        tokens_BM=torch.cat((tokens_BH, rows.tokens_BM[:, :num_pending]), 1),
        hidden_BMD=torch.cat((hidden_BHD, rows.hidden_BMD[:, :num_pending]), 1),
    )
