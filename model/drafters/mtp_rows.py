"""What waits for an MTP round, and which rows its passes read and write: pure index functions.

The rules and a worked example are spec §5 and mtp_tables.json. L is the number of known
tokens, m how many of them are pending: emitted since the last pass 1. MTP row i pairs
(token i + 1, hidden i) and lives in draft slot i; its position is its token's own place in the
text, i + 1.

Shape legend: B rows, M tokens pending at most, Q query rows of a pass, N passes, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.model.drafters.base import DraftContext
from tandem.model.network.batch import Batch, physical_slots

MAX_PENDING_TOKENS = 16
"""Tokens of a row that pass 1 can catch up with at once. Without drafts it runs every so many
steps: the more can wait, the less each costs, and the longer is the one that catches up."""


@dataclass(slots=True)
class MtpCatchUp:
    """A row is behind by the tokens that pass 1 has not read; a step catches up with as many as
    pass 1 is wide. Without drafts it waits until no more can be pending (core/execution.py)."""

    max_depth: int
    initial_backlog: int = 1

    @property
    def max_width(self) -> int:
        return max(self.max_depth + 1, MAX_PENDING_TOKENS)

    def catch_up_width(self, depth: int, behind: int) -> int:
        if depth == 0 and behind < self.max_width:
            return 0
        widths = depth + 1, self.max_depth + 1, self.max_width
        return next(width for width in widths if behind <= width)

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        return depth + 1 + (0 if catch_up_width else before)

    def common_widths(self, depth: int) -> tuple[int, ...]:
        return (depth + 1,) if depth else (0, self.max_width)


@dataclass(frozen=True, slots=True)
class MtpRows:
    """What the rounds before left behind, for B rows.

    ``tokens_BM[b, :m]`` are the m = ``num_pending_B[b]`` tokens emitted since pass 1 ran last, and
    ``hidden_BMD[b, i]`` is the main model's true hidden state of the token before
    ``tokens_BM[b, i]``. Where ``first_B`` is True that of the first token was not shipped (zeros):
    its row of pass 1 leaves no trace in the cache.
    """

    tokens_BM: Tensor
    hidden_BMD: Tensor
    num_pending_B: Tensor
    is_first_unknown_B: Tensor


def first_pass_batch(
    state: MtpRows, context: DraftContext, width: int, page_size: int, lag: int = 1
) -> Batch:
    """Pass 1: the pending tokens at slots L-lag-m .. L-lag-1, padded to ``width``. Their entries
    are written; of MTP the last one alone, the head row, attends (mtp.py: head_batch).

    The first one of ``first_B`` rows (its hidden state was not shipped) still reads the pulled
    entries but writes nothing: its own is right as the prefill rank wrote it.
    """
    row_Q = torch.arange(width, device=context.num_known_B.device)
    slots_BQ = (context.num_known_B - lag - state.num_pending_B).unsqueeze(1) + row_Q
    context_BQ = slots_BQ + 1
    real_BQ = row_Q < state.num_pending_B.unsqueeze(1)
    keep_BQ = real_BQ & ~(state.is_first_unknown_B.unsqueeze(1) & (row_Q == 0))
    return Batch(
        token_ids_BQ=state.tokens_BM[:, :width],
        positions_BQ=context_BQ if lag else slots_BQ,
        write_slots_BQ=physical_slots(context.page_table_BP, slots_BQ, keep_BQ, page_size),
        context_lens_BQ=context_BQ,
        page_table_BP=context.page_table_BP,
        real_BQ=real_BQ & context.real_B.unsqueeze(1),
    )


def later_slots(num_known_B: Tensor, num_passes: int, lag: int = 1) -> Tensor:
    """Passes 2, 3, ... [N, B]: the head row alone, which in pass k is (draft k-1, MTP output) at
    slot L-2-lag+k, provisional."""
    return torch.arange(num_passes, device=num_known_B.device).unsqueeze(1) + (num_known_B - lag)
