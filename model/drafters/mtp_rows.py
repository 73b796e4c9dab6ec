"""Which rows the passes of an MTP round read and write: pure index functions.

The rules and a worked example are spec §5 and mtp_tables.json. L is the number of known
tokens, m how many of them the last round emitted. MTP row i pairs (token i + 1, hidden i) and
lives in draft slot i; its position is its token's own place in the text, i + 1.

Shape legend: B rows, M tokens emitted last round at most, Q query rows of a pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassRows:
    """Slots [B, Q] of one pass; a row's position is its slot + 1.

    Where ``real_BQ`` is False the row is padding, and where ``keep_BQ`` is False it writes to the
    dummy page. ``head_B`` is the row that yields the draft.
    """

    slots_BQ: Tensor
    real_BQ: Tensor
    keep_BQ: Tensor
    head_B: Tensor


def first_pass(num_known_B: Tensor, num_emitted_B: Tensor, first_B: Tensor, width: int) -> PassRows:
    """Pass 1: the tokens emitted last round at slots L-1-m .. L-2, padded to ``width`` = M.

    ``first_B`` rows (hidden state not shipped) still read their pulled entries but write
    nothing: the entry at slot L-2 is right as the prefill rank wrote it.
    """
    row_Q = torch.arange(width, device=num_known_B.device)
    slots_BQ = (num_known_B - 1 - num_emitted_B).unsqueeze(1) + row_Q
    real_BQ = row_Q < num_emitted_B.unsqueeze(1)
    return PassRows(
        slots_BQ=slots_BQ,
        real_BQ=real_BQ,
        keep_BQ=real_BQ & ~first_B.unsqueeze(1),
        head_B=num_emitted_B - 1,
    )


def later_pass(num_known_B: Tensor, pass_number: int) -> PassRows:
    """Pass k >= 2: the head row alone, (draft k-1, MTP output) at slot L-3+k, provisional."""
    assert pass_number >= 2, f"pass {pass_number} is not a later pass"
    slots_BQ = (num_known_B - 3 + pass_number).unsqueeze(1)
    all_BQ = torch.ones_like(slots_BQ, dtype=torch.bool)
    return PassRows(
        slots_BQ=slots_BQ,
        real_BQ=all_BQ,
        keep_BQ=all_BQ,
        head_B=torch.zeros_like(num_known_B),
    )
