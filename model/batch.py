"""What one forward needs to know about its rows, and where those rows live in the cache.

Shape legend: B sequences, Q query rows of each, P pages of a page table, S context slots.
"""

from dataclasses import dataclass

from torch import Tensor

DUMMY_PAGE = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward; all tensors int64.

    A row attends to its sequence's slots 0 .. context_lens - 1, read from the cache only.
    ``write_slots_BQ`` are physical (page * page_size + offset); rows that must leave no
    trace write to the dummy page. ``expanded`` selects MLA's prefill form.
    """

    token_ids_BQ: Tensor
    positions_BQ: Tensor
    write_slots_BQ: Tensor
    context_lens_BQ: Tensor
    page_table_BP: Tensor
    expanded: bool = False


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
