"""What followed n-grams in the texts of all requests of a rank, finished ones too: a bounded table.

An n-gram stands where its hash says, and what comes later takes the place of what was there. Tokens
are copied into it: nothing of it is a place in a row.
Shape legend: B rows, W places of a window, M tokens of the longest n-gram, N drafts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_SLOTS = 1 << 18
"""4 MB; a power of two, and one more that takes what is to be forgotten."""
_FACTOR, _SHIFT = 0x9E3779B97F4A7C15 - (1 << 64), 29
EMPTY_HASH = 0


class NgramTable(NamedTuple):
    """The hash of the n-gram at each slot, and the token behind it."""

    hash_S: Tensor
    token_S: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> "NgramTable":
        hash_S = torch.full((NUM_SLOTS + 1,), EMPTY_HASH, dtype=torch.int64, device=device)
        return cls(hash_S, torch.zeros_like(hash_S))


def hash_ngrams(before_BWM: Tensor) -> Tensor:
    """Of the last 1 .. M of each place's tokens before it, the latest last: [B, W, M]."""
    found, mixed = [], torch.zeros_like(before_BWM[..., 0])
    for i in range(before_BWM.shape[2]):
        mixed = (mixed + before_BWM[..., -1 - i] + 1) * _FACTOR
        mixed = mixed ^ (mixed >> _SHIFT)
        found.append(mixed + i)
    return torch.stack(found, 2)


def store_ngrams(
    shared_table: NgramTable,
    before_BWM: Tensor,
    token_BW: Tensor,
    keep_BWM: Tensor,
    *,
    oldest: bool,
) -> None:
    """Put the tokens behind their n-grams, where these are to be kept; of ``oldest`` ones the first
    stays."""
    hash_BWM = hash_ngrams(before_BWM)
    slot_BWM = hash_BWM & (NUM_SLOTS - 1)
    if oldest:
        keep_BWM = keep_BWM & (shared_table.hash_S[slot_BWM] != hash_BWM)
    slot_BWM = slot_BWM.where(keep_BWM, NUM_SLOTS)
    shared_table.hash_S.index_put_((slot_BWM,), hash_BWM)
    shared_table.token_S.index_put_((slot_BWM,), token_BW.unsqueeze(2).expand_as(slot_BWM))


def lookup_drafts(
    shared_table: NgramTable, last_BM: Tensor, num_known_B: Tensor, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """Drafts [B, N] behind rows' last tokens, each by the longest n-gram that is there, and how
    many there are until none is."""
    size_M = torch.arange(1, last_BM.shape[1] + 1, device=last_BM.device)
    drafts, goes_on_B, num_B = [], num_known_B > 0, torch.zeros_like(num_known_B)
    for i in range(num_drafts):
        hash_BM = hash_ngrams(last_BM.unsqueeze(1)).squeeze(1)
        slot_BM = hash_BM & (NUM_SLOTS - 1)
        is_there_BM = (shared_table.hash_S[slot_BM] == hash_BM) & (
            size_M <= num_known_B.unsqueeze(1) + i
        )
        best_B1 = (is_there_BM * size_M).argmax(1, keepdim=True)
        goes_on_B = goes_on_B & is_there_BM.any(1)
        num_B = num_B + goes_on_B
        token_B1 = shared_table.token_S[slot_BM.gather(1, best_B1)]
        drafts.append(token_B1)
        last_BM = torch.cat((last_BM[:, 1:], token_B1), 1)
    return torch.cat(drafts, 1), num_B
