"""N-gram drafting (prompt lookup): propose the tokens that followed an earlier occurrence of the
text's last tokens. The options are those of TensorRT-LLM's n-gram drafter.

Shape legend: B rows, R rows of the table, T tokens of a row's text, W positions of a row. E tokens
that a row may emit, M tokens of the longest n-gram, N drafts.
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
    """Draft from the longest n-gram, of at most ``max_ngram_size`` tokens, that ends the text and
    occurs earlier in it.

    Of several occurrences, ``oldest`` selects the first. Otherwise the newest is taken, preferably
    one followed by enough tokens for all drafts.
    """

    name = "ngram"

    def __init__(self, max_ngram_size: int, *, oldest: bool) -> None:
        self._max_ngram_size = max_ngram_size
        self._oldest = oldest
        self._find_continuation: Callable[..., tuple[Tensor, Tensor]] = find_continuation

    def process_weights_after_loading(self, kernels: Kernels) -> None:
        self._find_continuation = kernels.ngram_lookup or find_continuation

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> "NgramDrafter":
        """Create the drafter from the n-gram settings.

        Without ``is_keep_all``, only the oldest occurrence of an n-gram counts, because it has the
        longest continuation.
        """
        oldest = spec_config.is_use_oldest or not spec_config.is_keep_all
        drafter_class = SharedNgramDrafter if spec_config.is_public_pool else cls
        return drafter_class(spec_config.max_matching_ngram_size, oldest=oldest)

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
    """An n-gram drafter that also searches the other texts of this rank if a row's own text has no
    match.

    Response times can therefore leak the texts of other requests.
    """

    def create_table(self, num_rows: int, num_tokens: int, device: torch.device) -> Any:
        """Allocate the texts of the rows and the shared n-gram table."""
        return super().create_table(num_rows, num_tokens, device), NgramTable.empty(device)

    def register_row(self, table: Any, row: int, token_ids: Sequence[int]) -> None:
        text_RT, shared_table = table
        super().register_row(text_RT, row, token_ids)
        place_1T = torch.arange(len(token_ids), device=text_RT.device).unsqueeze(0)
        self._store(
            text_RT=text_RT,
            shared_table=shared_table,
            rows_B=place_1T.new_tensor([row]),
            place_BW=place_1T,
            keep_BW=place_1T >= 0,
        )

    def update_table(
        self, table: Any, rows_B: Tensor, num_known_B: Tensor, emitted: Emitted
    ) -> None:
        text_RT, shared_table = table
        super().update_table(table=text_RT, rows_B=rows_B, num_known_B=num_known_B, emitted=emitted)
        place_BE = text_positions(emitted, num_known_B, text_RT.shape[1])
        is_told_BE = place_BE < num_known_B.unsqueeze(1)
        self._store(
            text_RT=text_RT,
            shared_table=shared_table,
            rows_B=rows_B,
            place_BW=place_BE,
            keep_BW=is_told_BE,
        )

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
            state=state,
            context=replace(context, table=text_RT),
            draft_shape=draft_shape,
            catch_up_width=catch_up_width,
            caches=caches,
        )
        if not draft_shape.num_nodes:
            return mine
        last_BM = self._preceding_tokens(text_RT, context.rows_B, known_B1).squeeze(1)
        tokens_BN, num_B = lookup_drafts(
            shared_table=shared_table,
            last_BM=last_BM,
            num_known_B=context.num_known_B,
            num_drafts=draft_shape.num_nodes,
        )
        assert mine.num_B is not None, "the n-gram drafter must return its number of drafts"
        has_own_B = mine.num_B > 0
        tokens_BN = mine.tokens_BN.where(has_own_B.unsqueeze(1), tokens_BN)
        return Drafts(tokens_BN, mine.num_B.where(has_own_B, num_B))

    def _preceding_tokens(self, text_RT: Tensor, rows_B: Tensor, place_BW: Tensor) -> Tensor:
        """Return the M tokens before each position: [B, W, M]. Positions before the start of the
        text get arbitrary tokens."""
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
        """Store the tokens at ``place_BW`` under the n-grams that precede them, where ``keep_BW``
        is True."""
        before_BWM = self._preceding_tokens(text_RT, rows_B, place_BW)
        size_M = torch.arange(1, self._max_ngram_size + 1, device=text_RT.device)
        keep_BWM = keep_BW.unsqueeze(2) & (size_M <= place_BW.unsqueeze(2))
        token_BW = text_RT[rows_B.unsqueeze(1), place_BW]
        store_ngrams(
            shared_table=shared_table,
            before_BWM=before_BWM,
            token_BW=token_BW,
            keep_BWM=keep_BWM,
            oldest=self._oldest,
        )


def find_continuation(
    text_RT: Tensor,
    rows_B: Tensor,
    num_known_B: Tensor,
    max_ngram_size: int,
    num_drafts: int,
    *,
    oldest: bool,
) -> tuple[Tensor, Tensor]:
    """Find the best earlier occurrence of each row's last tokens and return the tokens that follow
    it.

    Args:
        text_RT: Texts of all rows.
        rows_B: Rows to search.
        num_known_B: Number of known tokens of each row; the rest of its text is ignored.
        max_ngram_size: Maximum number of tokens to match.
        num_drafts: Number of drafts N.
        oldest: Whether to take the first of several occurrences.

    Returns:
        The drafts [B, N] and the number of valid ones per row.
    """
    text_BT = text_RT.index_select(0, rows_B)
    num_places = text_BT.shape[1]
    known_B1 = num_known_B.unsqueeze(1)
    place_T = torch.arange(num_places, device=text_BT.device)
    goes_on_BT = place_T < known_B1
    size_BT = torch.zeros_like(text_BT)
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
