"""DeepSeek's multi-token-prediction layer as a drafter, reused over its own output (spec §5).

Shape legend: B rows, M tokens emitted last round at most, N drafts, D hidden, P pages.
"""

import torch
from torch import Tensor

from model.batch import Batch, PromptRows, physical_slots
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
        self, next_ids_BQ: Tensor, hidden_BQD: Tensor, rows: PromptRows, caches: Caches
    ) -> None:
        batch = rows.batch(next_ids_BQ, 1, caches[MTP][0].shape[1])
        self._model.forward_mtp(batch, hidden_BQD, caches)

    def draft(self, state: DraftState, num_drafts: int, caches: Caches) -> Drafts:
        width = state.tokens_BM.shape[1]
        rows = first_pass(state.num_known_B, state.num_emitted_B, state.first_B, width)
        hidden_BMD = self._forward(state.tokens_BM, state.hidden_BMD, rows, state, caches)
        head_BD = hidden_BMD[torch.arange(len(hidden_BMD), device=hidden_BMD.device), rows.head_B]
        drafts_BN = state.tokens_BM[:, :0]
        drawn_from: list[Tensor] = []
        for i in range(num_drafts):
            next_B, q_BV = state.pick(self._model.logits(head_BD), drafts_BN)
            next_B1 = next_B.unsqueeze(1)
            drafts_BN = torch.cat((drafts_BN, next_B1), 1)
            if q_BV is not None:
                drawn_from.append(q_BV)
            if i + 1 < num_drafts:
                rows = later_pass(state.num_known_B, i + 2)
                head_BD = self._forward(next_B1, head_BD.unsqueeze(1), rows, state, caches).squeeze(
                    1
                )
        q_BNV = torch.stack(drawn_from, 1) if drawn_from else None
        return Drafts(drafts_BN, chain(num_drafts), q_BNV)

    def _forward(
        self,
        token_ids_BQ: Tensor,
        hidden_BQD: Tensor,
        rows: PassRows,
        state: DraftState,
        caches: Caches,
    ) -> Tensor:
        page_size = caches[MTP][0].shape[1]
        page_table_BP = state.page_table_BP
        batch = Batch(
            token_ids_BQ=token_ids_BQ,
            positions_BQ=rows.positions_BQ,
            write_slots_BQ=physical_slots(page_table_BP, rows.slots_BQ, rows.keep_BQ, page_size),
            context_lens_BQ=rows.context_lens_BQ,
            page_table_BP=page_table_BP,
            max_pages_B=state.max_pages_B,
        )
        return self._model.forward_mtp(batch, hidden_BQD, caches)
