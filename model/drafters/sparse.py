"""Self-speculation: the main model drafts with a part of its cache (MagicDec, arXiv 2408.11049).
That part is the first page, which holds the attention sinks, and a window of the newest pages.

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
"""Number of pages at the start of a text that drafts always read."""


class SparseWindow(NamedTuple):
    """The pages that drafts read.

    Attributes:
        page_table_BC: Pages of the sinks, then those of the window.
        skipped_B1: Number of slots of the text between sinks and window. A slot of the text in the
            window, minus this number, is its slot in ``page_table_BC``.
    """

    page_table_BC: Tensor
    skipped_B1: Tensor


class SparseDrafter(Drafter):
    """The main model as its own drafter, over a sparse window of its cache.

    Drafting writes entries of the main model's cache, which verification overwrites.
    """

    name = "self"

    def __init__(self, network: DeepseekV3, budget: int) -> None:
        self._network = network
        self._budget = budget
        self.uses_collectives = network.dispatch.placement is not None

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, network: DeepseekV3, spec_config: SpeculationConfig
    ) -> Self:
        return cls(network, spec_config.draft_budget_pages)

    def check(self, page_size: int, max_model_len: int) -> None:
        if (most := -(-max_model_len // page_size)) < self._budget:
            raise ValueError(
                f"speculation.draft_budget_pages={self._budget}: model.max_model_len="
                f"{max_model_len} needs only {most} pages of kv.page_size={page_size}; use at most "
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
        cut = select_window(
            context=context, budget=self._budget, num_drafts=draft_shape.depth, page_size=page_size
        )

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
    """Choose the pages that drafts read: ``budget`` pages, or more if the drafts span more
    pages."""
    table_BP = context.page_table_BP
    num_newest = max(budget - NUM_SINKS, 2 + num_drafts // page_size)
    last_B1 = (context.num_known_B - 2 + num_drafts).clamp(min=0).unsqueeze(1) // page_size
    begin_B1 = (last_B1 + 1 - num_newest).clamp(min=NUM_SINKS)
    page_C = torch.arange(NUM_SINKS + num_newest, device=begin_B1.device)
    pages_BC = page_C.where(page_C < NUM_SINKS, begin_B1 - NUM_SINKS + page_C)
    cut_BC = table_BP.gather(1, pages_BC.clamp(max=table_BP.shape[1] - 1))
    return SparseWindow(cut_BC, (begin_B1 - NUM_SINKS) * page_size)
