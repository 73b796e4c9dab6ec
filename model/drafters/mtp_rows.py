"""Pending tokens of MTP, and the rows that its passes read and write: pure index functions.

tests/data/mtp_tables.json is a worked example. L is the number of known tokens; m of them are
pending, which means emitted since the last pass 1. MTP row i pairs (token i + 1, hidden state i).
Its cache entry is in slot i, and its RoPE position is that of its token in the text, i + 1.

Shape legend: B rows, M tokens pending at most, Q query rows of a pass, N passes, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.model.drafters.base import DraftContext
from tandem.model.network.batch import Batch, physical_slots

MAX_PENDING_TOKENS = 16
"""Minimum of ``MtpCatchUp.max_width``, the number of pending tokens at which pass 1 runs even
without drafts. A larger value amortises pass 1 over more steps, but makes the step that catches up
longer."""


@dataclass(slots=True)
class MtpCatchUp:
    """Catch-up policy of MTP (core/execution.py).

    A row's backlog is its number of pending tokens. The width is the number of tokens that pass 1
    reads. In steps without drafts, pass 1 runs only when the backlog has reached its maximum.
    """

    max_depth: int
    initial_backlog: int = 1

    @property
    def max_width(self) -> int:
        """Maximum number of pending tokens of a row."""
        return max(self.max_depth + 1, MAX_PENDING_TOKENS)

    def catch_up_width(self, depth: int, backlog: int) -> int:
        if depth == 0 and backlog < self.max_width:
            return 0
        widths = depth + 1, self.max_depth + 1, self.max_width
        return next(width for width in widths if backlog <= width)

    def backlog(self, before: int, depth: int, catch_up_width: int) -> int:
        return depth + 1 + (0 if catch_up_width else before)

    def common_widths(self, depth: int) -> tuple[int, ...]:
        return (depth + 1,) if depth else (0, self.max_width)


@dataclass(frozen=True, slots=True)
class MtpRows:
    """State that MTP keeps of B rows between steps.

    Attributes:
        tokens_BM: Tokens emitted since the last pass 1; the first ``num_pending_B[b]`` of row b are
            valid.
        hidden_BMD: Hidden state of the main model for the token before each of them.
        num_pending_B: Number of pending tokens, m.
        is_first_unknown_B: True if the hidden state before the first pending token was not handed
            over and is zero here. That token's row of pass 1 then writes no cache entry.
    """

    tokens_BM: Tensor
    hidden_BMD: Tensor
    num_pending_B: Tensor
    is_first_unknown_B: Tensor


def first_pass_batch(
    state: MtpRows, context: DraftContext, width: int, page_size: int, lag: int = 1
) -> Batch:
    """Return the batch of pass 1: the pending tokens at slots L-lag-m .. L-lag-1, padded to
    ``width``.

    In MTP only the last row, the head row, attends (``head_batch`` in mtp.py).

    Every row writes its cache entry, except for the first row if its hidden state was not handed
    over (``is_first_unknown_B``). The entry that the prefill rank wrote for that row is correct and
    is kept.
    """
    row_Q = torch.arange(width, device=context.num_known_B.device)
    slots_BQ = (context.num_known_B - lag - state.num_pending_B).unsqueeze(1) + row_Q
    context_BQ = slots_BQ + 1
    real_BQ = row_Q < state.num_pending_B.unsqueeze(1)
    keep_BQ = real_BQ & ~(state.is_first_unknown_B.unsqueeze(1) & (row_Q == 0))
    return Batch(
        token_ids_BQ=state.tokens_BM[:, :width],
        positions_BQ=context_BQ if lag else slots_BQ,
        write_slots_BQ=physical_slots(
            page_table_BP=context.page_table_BP,
            slots_BQ=slots_BQ,
            keep_BQ=keep_BQ,
            page_size=page_size,
        ),
        context_lens_BQ=context_BQ,
        page_table_BP=context.page_table_BP,
        real_BQ=real_BQ & context.real_B.unsqueeze(1),
    )


def later_slots(num_known_B: Tensor, num_passes: int, lag: int = 1) -> Tensor:
    """Return the slots [N, B] that passes 2, 3, ... write. Their entries are provisional, because
    they depend on drafts.

    Pass k runs the head row alone, on draft k-1 and the output of pass k-1, at slot L-2-lag+k.
    """
    return torch.arange(num_passes, device=num_known_B.device).unsqueeze(1) + (num_known_B - lag)
