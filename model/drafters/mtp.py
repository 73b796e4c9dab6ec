"""DeepSeek's multi-token-prediction layer as a drafter, reused over its own output (spec §5).

Shape legend: B rows, M = n_max + 1, N drafts, D hidden, P pages.
"""

import torch
from torch import Tensor

from model.batch import Batch, physical_slots
from model.cache import MTP, CacheGroup, Caches
from model.deepseek import DeepseekV3
from model.drafters.base import Drafts, DraftState, chain
from model.drafters.mtp_rows import PassRows, first_pass, later_pass


class MtpDrafter:
    """Pass 1 rewrites last round's rows from their true hidden states and yields draft 1;
    passes 2..n are the head row alone, fed with the MTP layer's own normed output."""

    name = "mtp"
    max_drafts: int | None = None

    def __init__(self, model: DeepseekV3) -> None:
        self._model = model
        self.cache_groups: tuple[CacheGroup, ...] = (CacheGroup(MTP, 1, model.config.latent_dim),)

    def prefill(
        self,
        next_ids_BQ: Tensor,
        hidden_BQD: Tensor,
        first_slot: int,
        page_table_BP: Tensor,
        caches: Caches,
    ) -> None:
        num_rows, num_tokens = next_ids_BQ.shape
        slots_BQ = torch.arange(
            first_slot, first_slot + num_tokens, device=next_ids_BQ.device
        ).expand(num_rows, -1)
        rows = PassRows(
            slots_BQ=slots_BQ,
            positions_BQ=slots_BQ + 1,
            context_lens_BQ=slots_BQ + 1,
            keep_BQ=torch.ones_like(slots_BQ, dtype=torch.bool),
            head_B=slots_BQ[:, 0],
        )
        batch = self._batch(next_ids_BQ, rows, page_table_BP, caches, expanded=True)
        self._model.forward_mtp(batch, hidden_BQD, caches)

    def draft(self, state: DraftState, num_drafts: int, caches: Caches) -> Drafts:
        width = state.tokens_BM.shape[1]
        rows = first_pass(state.num_known_B, state.num_emitted_B, state.first_B, width)
        hidden_BMD = self._forward(state.tokens_BM, state.hidden_BMD, rows, state, caches)
        head_BD = hidden_BMD[torch.arange(len(hidden_BMD), device=hidden_BMD.device), rows.head_B]
        tokens: list[Tensor] = []
        for i in range(num_drafts):
            tokens.append(state.pick(self._model.logits(head_BD), i))
            if i + 1 < num_drafts:
                rows = later_pass(state.num_known_B, i + 2)
                head_BD = self._forward(
                    tokens[-1].unsqueeze(1), head_BD.unsqueeze(1), rows, state, caches
                ).squeeze(1)
        drafts = torch.stack(tokens, 1) if tokens else state.tokens_BM[:, :0]
        return Drafts(drafts, chain(num_drafts))

    def _forward(
        self,
        token_ids_BQ: Tensor,
        hidden_BQD: Tensor,
        rows: PassRows,
        state: DraftState,
        caches: Caches,
    ) -> Tensor:
        batch = self._batch(token_ids_BQ, rows, state.page_table_BP, caches, expanded=False)
        return self._model.forward_mtp(batch, hidden_BQD, caches)

    def _batch(
        self,
        token_ids_BQ: Tensor,
        rows: PassRows,
        page_table_BP: Tensor,
        caches: Caches,
        *,
        expanded: bool,
    ) -> Batch:
        page_size = caches[MTP][0].shape[1]
        return Batch(
            token_ids_BQ=token_ids_BQ,
            positions_BQ=rows.positions_BQ,
            write_slots_BQ=physical_slots(page_table_BP, rows.slots_BQ, rows.keep_BQ, page_size),
            context_lens_BQ=rows.context_lens_BQ,
            page_table_BP=page_table_BP,
            expanded=expanded,
        )
