"""Drafts from the text itself: what came after the place where its last tokens stood before (prompt
lookup decoding; spec of its options: TensorRT-LLM's n-gram drafter).

Shape legend: B rows, R rows of the memory, T tokens of a row's text, W places of one, E places that
a row may emit, M tokens of the longest n-gram, N drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import DraftContext, Drafts, Emitted
from tandem.model.drafters.ngram_table import NgramTable, lookup_drafts, store_ngrams
from tandem.model.drafters.text_drafter import TextDrafter, text_positions
from tandem.model.kernels.base import Kernels
from tandem.model.network.cache import Caches
from tandem.model.network.deepseek import DeepseekV3


class NgramDrafter(TextDrafter):
    """The longest n-gram that ends the text and stood in it before, up to ``max_ngram_size``
    tokens; its ``oldest`` place, or the newest one that as many tokens follow as are to be
    drafted."""

    name = "ngram"

    def __init__(self, max_ngram_size: int, *, oldest: bool) -> None:
        self._max_ngram_size, self._oldest = max_ngram_size, oldest
        self._find_continuation: Callable[..., tuple[Tensor, Tensor]] = find_continuation

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        self._find_continuation = kernels.ngram_lookup or find_continuation

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> "NgramDrafter":
        """Of several places that are not all kept the oldest is: no other has a longer rest."""
        oldest = spec_config.is_use_oldest or not spec_config.is_keep_all
        made = SharedNgramDrafter if spec_config.is_public_pool else cls
        return made(spec_config.max_matching_ngram_size, oldest=oldest)

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        of = (
            context.table,
            context.rows_B,
            context.num_known_B,
            self._max_ngram_size,
            draft_shape.num_nodes,
        )
        return Drafts(*self._find_continuation(*of, oldest=self._oldest))


class SharedNgramDrafter(NgramDrafter):
    """Where a text has no such place in itself, what followed its last tokens in others of this
    rank. So others' texts can be guessed at from how long an answer takes."""

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> Any:
        return super().create_table(num_rows, num_tokens, device), NgramTable.empty(device)

    def register_row(self, table: Any, row: int, token_ids: Sequence[int]) -> None:
        text_RT, shared_table = table
        super().register_row(text_RT, row, token_ids)
        place_1T = torch.arange(len(token_ids), device=text_RT.device).unsqueeze(0)
        self._store(text_RT, shared_table, place_1T.new_tensor([row]), place_1T, place_1T >= 0)

    def update_table(
        self, table: Any, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        text_RT, shared_table = table
        super().update_table(text_RT, rows_B, num_known_B, emitted)
        place_BE = text_positions(emitted, num_known_B, text_RT.shape[1])
        is_told_BE = place_BE < num_known_B.unsqueeze(1)
        self._store(text_RT, shared_table, rows_B, place_BE, is_told_BE)

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        (text_RT, shared_table), known_B1 = context.table, context.num_known_B.unsqueeze(1)
        mine = super().draft(
            state, replace(context, table=text_RT), draft_shape, catch_up_width, caches
        )
        if not draft_shape.num_nodes:
            return mine
        last_BM = self._preceding_tokens(text_RT, context.rows_B, known_B1).squeeze(1)
        tokens_BN, num_B = lookup_drafts(
            shared_table, last_BM, context.num_known_B, draft_shape.num_nodes
        )
        assert mine.num_B is not None, "n-grams know how many they found"
        has_own_B = mine.num_B > 0
        tokens_BN = mine.tokens_BN.where(has_own_B.unsqueeze(1), tokens_BN)
        return Drafts(tokens_BN, mine.num_B.where(has_own_B, num_B))

    def _preceding_tokens(self, text_RT: Tensor, rows_B: Tensor, place_BW: Tensor) -> Tensor:
        """The tokens before each place of rows' texts [B, W, M]; at the beginning any."""
        back_M = torch.arange(-self._max_ngram_size, 0, device=text_RT.device)
        return text_RT[rows_B.view(-1, 1, 1), (place_BW.unsqueeze(2) + back_M).clamp(min=0)]

    def _store(
        self,
        text_RT: Tensor,
        shared_table: NgramTable,
        rows_B: Tensor,
        place_BW: Tensor,
        keep_BW: Tensor,
    ) -> None:
        before_BWM = self._preceding_tokens(text_RT, rows_B, place_BW)
        size_M = torch.arange(1, self._max_ngram_size + 1, device=text_RT.device)
        keep_BWM = keep_BW.unsqueeze(2) & (size_M <= place_BW.unsqueeze(2))
        token_BW = text_RT[rows_B.unsqueeze(1), place_BW]
        store_ngrams(shared_table, before_BWM, token_BW, keep_BWM, oldest=self._oldest)


def find_continuation(
    text_RT: Tensor,
    rows_B: Tensor,
    num_known_B: Tensor,
    max_ngram_size: int,
    num_drafts: int,
    *,
    oldest: bool,
) -> tuple[Tensor, Tensor]:
    """What follows the best earlier place in the texts of these rows, of which ``num_known_B``
    tokens count: [B, N], and how many of them are text."""
    text_BT = text_RT.index_select(0, rows_B)
    num_places = text_BT.shape[1]
    known_B1, place_T = num_known_B.unsqueeze(1), torch.arange(num_places, device=text_BT.device)
    goes_on_BT, size_BT = place_T < known_B1, torch.zeros_like(text_BT)
    for i in range(max_ngram_size):
        token_B1 = text_BT.gather(1, (known_B1 - 1 - i).clamp(min=0))
        same_BT = F.pad(text_BT == token_B1, (i + 1, 0))[:, :num_places]
        goes_on_BT = goes_on_BT & same_BT
        size_BT = size_BT + goes_on_BT
    order_BT = num_places - 1 - place_T.expand_as(text_BT)
    if not oldest:
        is_whole_BT = place_T + num_drafts <= known_B1
        order_BT = place_T + is_whole_BT * num_places
    best_B1 = (size_BT * (2 * num_places) + order_BT).argmax(1, keepdim=True)
    num_B1 = (known_B1 - best_B1).clamp(max=num_drafts)
    num_B1 = num_B1.where(size_BT.gather(1, best_B1) > 0, 0)
    places_BN = best_B1 + torch.arange(num_drafts, device=text_BT.device)
    return text_BT.gather(1, places_BN.clamp(max=num_places - 1)), num_B1.squeeze(1)
