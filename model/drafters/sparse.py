"""The main model drafts for itself over a part of its cache (MagicDec, arXiv 2408.11049): the first
page and the newest ones, attention sinks and a window.

Shape legend: B rows, N drafts, P pages of a row's table, C pages that drafts read.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from tandem.core.config import SpeculationConfig
from tandem.core.draft_shapes import DraftShape
from tandem.model.checkpoint.weights import Checkpoint
from tandem.model.drafters.base import DraftContext, Drafter, Drafts
from tandem.model.network.batch import Batch, physical_slots
from tandem.model.network.cache import MAIN, Caches
from tandem.model.network.deepseek import DeepseekV3

NUM_SINKS = 1
"""Pages at the beginning of a text."""


class SparseWindow(NamedTuple):
    """The pages that drafts read [B, C], and how many slots lie between those of the first and of
    the rest [B, 1]: by so much a slot of the text stands further left among them."""

    page_table_BC: Tensor
    skipped_B1: Tensor


class SparseDrafter(Drafter):
    """What it writes are entries of the main model's own, which verification writes again."""

    name = "self"

    def __init__(self, network: DeepseekV3, budget: int) -> None:
        self._network, self._budget = network, budget
        self.uses_collectives = network.dispatch.placement is not None

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        return cls(network, spec_config.draft_budget_pages)

    def check(self, page_size: int, max_model_len: int) -> None:
        if (most := -(-max_model_len // page_size)) < self._budget:
            raise ValueError(
                f"speculation.draft_budget_pages={self._budget}: {max_model_len} tokens "
                f"(model.max_model_len) have {most} pages of kv.page_size={page_size}; use at most "
                f"{most}"
            )

    def draft(
        self,
        state: None,
        context: DraftContext,
        draft_shape: DraftShape,
        catch_up_width: int,
        caches: Caches,
    ) -> Drafts:
        page_size = caches[MAIN][0].shape[1]
        cut = select_window(context, self._budget, draft_shape.depth, page_size)

        def logits(i: int, last_B1: Tensor) -> Tensor:
            slots_B1 = (context.num_known_B - 1 + i).unsqueeze(1)
            batch = Batch(
                last_B1,
                slots_B1,
                physical_slots(context.page_table_BP, slots_B1, None, page_size),
                slots_B1 + 1 - cut.skipped_B1,
                cut.page_table_BC,
                real_BQ=context.real_B.unsqueeze(1),
            )
            return self._network.logits(self._network(batch, caches)).squeeze(1)

        return context.draft_chain(draft_shape.depth, logits)


def select_window(
    context: DraftContext, budget: int, num_drafts: int, page_size: int
) -> SparseWindow:
    """As many pages as drafts have at least, however small these are."""
    table_BP = context.page_table_BP
    num_newest = max(budget - NUM_SINKS, 2 + num_drafts // page_size)
    last_B1 = (context.num_known_B - 2 + num_drafts).clamp(min=0).unsqueeze(1) // page_size
    begin_B1 = (last_B1 + 1 - num_newest).clamp(min=NUM_SINKS)
    page_C = torch.arange(NUM_SINKS + num_newest, device=begin_B1.device)
    pages_BC = page_C.where(page_C < NUM_SINKS, begin_B1 - NUM_SINKS + page_C)
    cut_BC = table_BP.gather(1, pages_BC.clamp(max=table_BP.shape[1] - 1))
    return SparseWindow(cut_BC, (begin_B1 - NUM_SINKS) * page_size)
