"""Batch metadata of one forward pass: token ids, positions, cache slots and page tables.

Shape legend: B sequences, Q query rows of each, P pages of a page table, S context slots,
L cached width, G segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.pages import DUMMY_PAGE
from tandem.model.checkpoint.tensors import upload


@dataclass(frozen=True, slots=True)
class Segments:
    """Sequences packed into one row of tokens, without padding between them.

    A token attends to its own sequence up to itself, never to another segment.

    Attributes:
        lengths: Number of tokens of each segment, which are the last ones of its context.
        contexts: Number of context tokens of each segment, its own tokens included.
        ends_G: Row after the last token of each segment.
    """

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    ends_G: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one forward pass. All tensors except masks are int64.

    Attributes:
        token_ids_BQ: Input tokens.
        positions_BQ: RoPE positions.
        write_slots_BQ: Physical slot (page * page_size + offset) that each row's cache entry is
            written to. It is on the dummy page for rows whose entry must not be kept.
        context_lens_BQ: Each row attends to slots 0 .. context_lens - 1 of its sequence, which are
            read from the cache. Consecutive rows of a sequence differ by 1, except in trees and
            padding.
        page_table_BP: Pages of each sequence. With ``segments``: the pages of all segments in
            order, [1, P].
        segments: Selects the prefill form of MLA, with B = 1. None: the absorbed form.
        real_BQ: False for padding rows, None without padding.
        bits_BQ: Draft-tree rows also attend to slot context_lens + i if bit i is set, i < 64.
    """

    token_ids_BQ: Tensor
    positions_BQ: Tensor
    write_slots_BQ: Tensor
    context_lens_BQ: Tensor
    page_table_BP: Tensor
    segments: Segments | None = None
    real_BQ: Tensor | None = None
    bits_BQ: Tensor | None = None


def gather_pages(cache: Tensor, page_table_BP: Tensor) -> Tensor:
    """Copy the pages of each sequence into one context: [B, S, L]."""
    # index_select copies whole pages at a time.
    pages = cache.index_select(0, page_table_BP.flatten())
    return pages.view(page_table_BP.shape[0], -1, cache.shape[-1])


def visible_slots(context_lens_BQ: Tensor, num_slots: int, bits_BQ: Tensor | None = None) -> Tensor:
    """Return which of the first ``num_slots`` slots each row attends to: bool [B, Q, S]."""
    slots_S = torch.arange(num_slots, device=context_lens_BQ.device)
    if bits_BQ is None:
        return slots_S < context_lens_BQ.unsqueeze(-1)
    behind_BQS = slots_S - context_lens_BQ.unsqueeze(-1)
    is_set_BQS = (bits_BQ.unsqueeze(-1) >> behind_BQS.clamp(0, 63)) & 1 == 1
    return (behind_BQS < 0) | (is_set_BQS & (behind_BQS < 64))


def physical_slots(
    page_table_BP: Tensor, slots_BQ: Tensor, keep_BQ: Tensor | None, page_size: int
) -> Tensor:
    """Map slots of sequences to physical slots [B, Q], on the dummy page if ``keep_BQ`` is False.

    Slots beyond the page table map to the dummy page too. Drafts may reach past
    ``max_model_len``, where no entry is ever read.
    """
    num_slots = page_table_BP.shape[1] * page_size
    is_inside_BQ = slots_BQ < num_slots
    keep_BQ = is_inside_BQ if keep_BQ is None else keep_BQ & is_inside_BQ
    slots_BQ = slots_BQ.clamp(0, num_slots - 1)
    page_ids_BQ = page_table_BP.gather(1, slots_BQ // page_size).where(keep_BQ, DUMMY_PAGE)
    return torch.add(slots_BQ % page_size, page_ids_BQ, alpha=page_size)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence to compute, in slots lo .. lo + len(token_ids) - 1 of ``pages``."""

    token_ids: Sequence[int]
    lo: int
    pages: Sequence[int]

    @property
    def context(self) -> int:
        return self.lo + len(self.token_ids)

    def pages_read(self, page_size: int) -> Sequence[int]:
        return self.pages[: -(-self.context // page_size)]

    def columns(self, page_size: int) -> Tensor:
        """Return token ids, slots, physical slots and context lengths: [4, tokens]."""
        slots = torch.arange(self.lo, self.context)
        places = torch.tensor(self.pages)[slots // page_size] * page_size + slots % page_size
        return torch.stack((torch.tensor(self.token_ids), slots, places, slots + 1))


def pack_segments(
    segments: Sequence[Segment], page_size: int, device: torch.device, num_rows: int = 0
) -> Batch:
    """Pack the tokens of all segments into a batch of one sequence, padded to ``num_rows``.

    ``segments`` may be empty. Positions are slots. Padding writes to the dummy page.
    """
    parts = [torch.empty(4, 0).long(), *(segment.columns(page_size) for segment in segments)]
    num_padding = max(0, num_rows - sum(part.shape[1] for part in parts))
    columns = upload(F.pad(torch.cat(parts, 1), (0, num_padding)), device)
    ids_1T, slots_1T, places_1T, context_lens_1T = columns.split(1)
    pages = list(chain.from_iterable(segment.pages_read(page_size) for segment in segments))
    lengths = tuple(len(segment.token_ids) for segment in segments)
    ends_G = upload(torch.tensor(list(accumulate(lengths)), dtype=torch.int64), device)
    return Batch(
        token_ids_BQ=ids_1T,
        positions_BQ=slots_1T,
        write_slots_BQ=places_1T,
        context_lens_BQ=context_lens_1T,
        page_table_BP=upload(torch.tensor([pages], dtype=torch.int64), device),
        segments=Segments(lengths, tuple(segment.context for segment in segments), ends_G),
        real_BQ=context_lens_1T > 0 if num_padding else None,
    )
