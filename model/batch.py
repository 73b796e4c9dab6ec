"""What one forward needs to know about its rows, and where those rows live in the cache.

Shape legend: B sequences, Q query rows of each, P pages of a page table, S context slots,
L cached width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DUMMY_PAGE = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward; all tensors int64.

    A row attends to its sequence's slots 0 .. context_lens - 1, read from the cache only.
    ``write_slots_BQ`` are physical (page * page_size + offset); rows that must leave no
    trace write to the dummy page. ``expanded`` selects MLA's prefill form. ``max_pages_B`` is
    the host's bound on the pages each sequence reads, empty if all of its table counts.
    """

    token_ids_BQ: Tensor
    positions_BQ: Tensor
    write_slots_BQ: Tensor
    context_lens_BQ: Tensor
    page_table_BP: Tensor
    expanded: bool = False
    max_pages_B: tuple[int, ...] = ()


def gather_pages(cache: Tensor, page_table_BP: Tensor) -> Tensor:
    """Every sequence's pages in order: [B, S, L]. index_select copies whole pages."""
    pages = cache.index_select(0, page_table_BP.flatten())
    return pages.view(page_table_BP.shape[0], -1, cache.shape[-1])


def visible_slots(batch: Batch, num_slots: int) -> Tensor:
    """Which of the first ``num_slots`` slots each query row attends to: bool [B, Q, S]."""
    slots_S = torch.arange(num_slots, device=batch.context_lens_BQ.device)
    return slots_S < batch.context_lens_BQ.unsqueeze(-1)


def physical_slots(
    page_table_BP: Tensor, slots_BQ: Tensor, keep_BQ: Tensor, page_size: int
) -> Tensor:
    """Physical slots [B, Q] of sequence slots; the dummy page's where ``keep_BQ`` is False.

    Slots beyond the page table land on the dummy page too: a draft may reach past
    ``max_model_len``, where nothing it writes is ever read.
    """
    pages_BQ = slots_BQ.clamp(min=0) // page_size
    keep_BQ = keep_BQ & (pages_BQ < page_table_BP.shape[1])
    page_ids_BQ = page_table_BP.gather(1, pages_BQ.clamp(max=page_table_BP.shape[1] - 1))
    return page_ids_BQ.where(keep_BQ, DUMMY_PAGE) * page_size + slots_BQ.clamp(min=0) % page_size


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive sequence slots to compute; rows where ``keep_BQ`` is False are padding."""

    slots_BQ: Tensor
    keep_BQ: Tensor
    page_table_BP: Tensor

    def batch(self, token_ids_BQ: Tensor, position_offset: int, page_size: int) -> Batch:
        """An expanded-form batch; a slot's position is the slot plus ``position_offset``."""
        return Batch(
            token_ids_BQ=token_ids_BQ,
            positions_BQ=self.slots_BQ + position_offset,
            write_slots_BQ=physical_slots(
                self.page_table_BP, self.slots_BQ, self.keep_BQ, page_size
            ),
            context_lens_BQ=torch.where(self.keep_BQ, self.slots_BQ + 1, 1),
            page_table_BP=self.page_table_BP,
            expanded=True,
        )
