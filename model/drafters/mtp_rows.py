"""Which rows the passes of an MTP round read and write: pure index functions.

The rules and a worked example are spec §5 and mtp_tables.json. L is the number of known
tokens, m how many of them are pending: emitted since the last pass 1. MTP row i pairs
(token i + 1, hidden i) and lives in draft slot i; its position is its token's own place in the
text, i + 1.

Shape legend: B rows, M tokens pending at most, Q query rows of a pass, N passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassRows:
    """Slots [B, Q] of pass 1; a row's position is its slot + 1.

    Where ``real_BQ`` is False the row is padding, and where ``keep_BQ`` is False it writes to the
    dummy page. ``head_B`` is the row that yields the draft.
    """

    slots_BQ: Tensor
    real_BQ: Tensor
    keep_BQ: Tensor
    head_B: Tensor


def first_pass(num_known_B: Tensor, num_pending_B: Tensor, first_B: Tensor, width: int) -> PassRows:
    """Pass 1: the pending tokens at slots L-1-m .. L-2, padded to ``width`` = M.

    The first one of ``first_B`` rows (its hidden state was not shipped) still reads the pulled
    entries but writes nothing: its own is right as the prefill rank wrote it.
    """
    row_Q = torch.arange(width, device=num_known_B.device)
    slots_BQ = (num_known_B - 1 - num_pending_B).unsqueeze(1) + row_Q
    real_BQ = row_Q < num_pending_B.unsqueeze(1)
    return PassRows(
        slots_BQ=slots_BQ,
        real_BQ=real_BQ,
        keep_BQ=real_BQ & ~(first_B.unsqueeze(1) & (row_Q == 0)),
        head_B=num_pending_B - 1,
    )


def later_slots(num_known_B: Tensor, num_passes: int) -> Tensor:
    """Passes 2, 3, ... [N, B]: the head row alone, which in pass k is (draft k-1, MTP output) at
    slot L-3+k, provisional."""
    offsets_N = torch.arange(num_passes, device=num_known_B.device)
    return offsets_N.unsqueeze(1) + (num_known_B - 1)
