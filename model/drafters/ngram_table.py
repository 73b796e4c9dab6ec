"""A bounded hash table from n-grams to the token that followed them in the texts of a rank. It
includes the texts of finished requests.

An n-gram is stored at the slot of its hash and replaces the previous entry there. Tokens are copied
into the table, so no entry refers to a row.
Shape legend: B rows, W positions of a window, M tokens of the longest n-gram, N drafts, S slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_SLOTS = 1 << 18
"""Number of slots, a power of two (4 MB). One further slot receives the entries that are to be
discarded."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT = 29
EMPTY_HASH = 0


class NgramTable(NamedTuple):
    """The hash of the n-gram in each slot, and the token that follows it."""

    hash_S: Tensor
    token_S: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> "NgramTable":
        """Allocate an empty table."""
        hash_S = torch.full((NUM_SLOTS + 1,), EMPTY_HASH, dtype=torch.int64, device=device)
        return cls(hash_S, torch.zeros_like(hash_S))


def hash_ngrams(before_BWM: Tensor) -> Tensor:
    """Return the hashes [B, W, M] of the last 1 .. M tokens before each position."""
    found = []
    mixed = torch.zeros_like(before_BWM[..., 0])
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
    """Store each token under the n-grams before it, where ``keep_BWM`` is True. With ``oldest``, an
    existing entry of the same n-gram is not replaced."""
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
    """Look up a chain of drafts after each row's last tokens, each by the longest n-gram that is
    found.

    Returns:
        The drafts [B, N] and the number of them before the first n-gram that is missing.
    """
    size_M = torch.arange(1, last_BM.shape[1] + 1, device=last_BM.device)
    drafts = []
    goes_on_B = num_known_B > 0
    num_B = torch.zeros_like(num_known_B)
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
