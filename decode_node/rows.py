"""The row slots of one decode rank as tensors; every running sequence owns one row.

Shape legend: R row slots, B active rows, M tokens pending at most, D hidden, P pages of a row's
table.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.request import Request, SamplingParams
from decode_node.plan import PLAIN, Extras
from decode_node.sequence import Sequence
from model.acceptance import KIND_NUMBERS
from model.acceptance.base import AcceptanceRows, Verdict
from model.adjust import AdjustRows, count_emitted, no_rules, set_rules
from model.loaded import LoadedModel
from model.sampling import SamplingRows
from model.tensors import each, select, upload, write
from model.think import thinking_at_start


@dataclass(frozen=True, slots=True)
class RowState:
    """What a step changes. ``num_known`` is L (prompt and emitted tokens), ``num_output`` how many
    were emitted in all; ``thinking`` is the think phase. For the rest see DraftState."""

    tokens_BM: Tensor
    hidden_BMD: Tensor
    num_pending_B: Tensor
    num_known_B: Tensor
    num_output_B: Tensor
    first_B: Tensor
    thinking_B: Tensor


@dataclass(frozen=True, slots=True)
class RowTensors:
    """Rows between two steps; the first axis of every tensor is the row."""

    state: RowState
    page_table_BP: Tensor
    real_B: Tensor
    sampling: SamplingRows
    acceptance: AcceptanceRows


MADE_UP = 512
"""Tokens of context that rows of trials have: attention is a large part of a step."""


class Rows:
    """Owner of the row tensors; used on the engine thread only.

    Two rows more than there are slots fill batches up: every padding row is read from one and
    written to the other, so padding is the same in every step. Behind these are as many as there
    are slots, made up for trials: computed like real rows with a context of MADE_UP tokens and, as
    these are, spread over experts. None of either owns a page: what they write lands on the
    dummy page.
    """

    def __init__(
        self, loaded: LoadedModel, num_rows: int, width: int, num_pages_per_row: int
    ) -> None:
        self._loaded = loaded
        self._read_padding, self._write_padding = num_rows, num_rows + 1
        self._num_pages = [0] * num_rows
        hidden_size, device = loaded.config.hidden_size, loaded.device
        hidden_1MD = torch.zeros(1, width, hidden_size, dtype=loaded.dtype, device=device)
        pages_1P = torch.zeros(1, num_pages_per_row, dtype=torch.int64)
        padding = _one_row(_PADDING, _PADDING.output_ids, hidden_1MD, pages_1P, is_real=False)
        self._num_rows = num_rows + 2
        self._table: RowTensors = each(
            lambda tensor: tensor.repeat_interleave(2 * num_rows + 2, 0), upload(padding, device)
        )
        self._make_up(self._num_rows)
        self._rules: AdjustRows | None = None

    def begin(self, sequence: Sequence, first_token: int, hidden_D: Tensor | None) -> None:
        """``sequence`` enters with ``first_token``, which is not in the cache yet. Without
        ``hidden_D`` its hidden state is zeros and its first pass leaves no trace (zero_hidden).
        Memory for logit rules is taken when the first request, of any rank, has some."""
        row, request, loaded = sequence.row, sequence.request, self._loaded
        output_ids = (*request.output_ids, first_token)
        hidden_1MD = torch.zeros_like(self._table.state.hidden_BMD[:1])
        if hidden_D is not None:
            hidden_1MD[0, 0] = hidden_D
        pages_1P = torch.zeros(1, self._table.page_table_BP.shape[1], dtype=torch.int64)
        pages_1P[0, : len(sequence.pages)] = torch.tensor(sequence.pages)
        new = _one_row(
            request,
            output_ids,
            hidden_1MD,
            pages_1P,
            limit=sequence.limit,
            is_first=hidden_D is None,
            is_thinking=thinking_at_start(request.prompt_ids, output_ids, loaded.think_ids),
        )
        write(self._table, self._upload([row]), upload(new, loaded.device))
        self._num_pages[row] = len(sequence.pages)
        if request.sampling.adjusts_logits:
            self.hold_rules()
        if self._rules is not None:
            set_rules(self._rules, row, request, output_ids, sequence.stops)

    @torch.inference_mode(False)
    def hold_rules(self) -> None:
        """Steps with rules are possible from now on. Also between steps the memory is written to,
        as tensors of inference may not be."""
        if self._rules is None:
            vocab_size, device = self._loaded.config.vocab_size, self._loaded.device
            self._rules = no_rules(self._num_rows, vocab_size, device)

    def grow(self, sequence: Sequence) -> None:
        """The page table of a sequence that may have got pages; writes only what is new."""
        row, known, num = sequence.row, self._num_pages[sequence.row], len(sequence.pages)
        if num > known:
            self._table.page_table_BP[row, known:num] = self._upload(sequence.pages[known:])
            self._num_pages[row] = num

    def index(
        self, rows: list[int], num_rows: int, is_trial: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``rows`` and padding, or made-up rows, up to ``num_rows``: where a step reads [B] and
        where it writes."""
        num, first = num_rows - len(rows), self._num_rows
        more = range(first, first + num) if is_trial else [self._read_padding] * num
        read = [*rows, *more]
        read_B, write_B = self._upload([read, [*rows, *[self._write_padding] * num]])
        return read_B, write_B

    def select(self, read_B: Tensor, num_pages: int | None, extras: Extras = PLAIN) -> RowTensors:
        """The rows of ``index``, page tables cut to ``num_pages`` if that is given."""
        pages_BP = self._table.page_table_BP[:, :num_pages]
        rows = select(replace(self._table, page_table_BP=pages_BP), read_B)
        rules = None
        if extras.has_rules:
            assert self._rules is not None, "no row has rules"
            rules = select(self._rules, read_B)
        sampler, all_greedy = self._loaded.kernels, extras.all_greedy
        sampling = replace(rows.sampling, all_greedy=all_greedy, rules=rules, sampler=sampler)
        return replace(rows, sampling=sampling)

    def store(
        self, write_B: Tensor, new: RowState, verdict: Verdict, extras: Extras = PLAIN
    ) -> None:
        """Keep what a step changed."""
        write(self._table.state, write_B, new)
        if extras.has_rules:
            assert self._rules is not None, "no row has rules"
            num_B = verdict.num_accepted_B + 1
            count_emitted(self._rules, write_B, verdict.tokens_BN1, num_B)

    def _make_up(self, first: int) -> None:
        """The rows of trials."""
        tokens_BM, hidden_BMD = self._table.state.tokens_BM[first:], self._table.state.hidden_BMD
        ids = torch.arange(tokens_BM.numel(), device=tokens_BM.device)
        tokens_BM.copy_(ids.view_as(tokens_BM) % self._loaded.config.vocab_size)
        hidden_BMD[first:].normal_()
        self._table.state.num_known_B[first:] = min(MADE_UP, self._loaded.max_model_len // 2)
        self._table.real_B[first:] = True

    def _upload(self, values: list[int] | list[list[int]]) -> Tensor:
        return upload(torch.tensor(values), self._loaded.device)


_PADDING = Request("padding", (0,), (0,), SamplingParams(seed=0))


def _one_row(
    request: Request,
    output_ids: tuple[int, ...],
    hidden_1MD: Tensor,
    pages_1P: Tensor,
    *,
    limit: int = 0,
    is_first: bool = False,
    is_thinking: bool = False,
    is_real: bool = True,
) -> RowTensors:
    """A row that has just emitted one token, on the host but for its hidden states."""
    speculation, num_output = request.speculation, len(output_ids)
    tokens_1M = torch.zeros(hidden_1MD.shape[:2], dtype=torch.int64)
    tokens_1M[0, 0] = output_ids[-1]
    return RowTensors(
        state=RowState(
            tokens_BM=tokens_1M,
            hidden_BMD=hidden_1MD,
            num_pending_B=torch.tensor([1]),
            num_known_B=torch.tensor([len(request.prompt_ids) + num_output]),
            num_output_B=torch.tensor([num_output]),
            first_B=torch.tensor([is_first]),
            thinking_B=torch.tensor([is_thinking]),
        ),
        page_table_BP=pages_1P,
        real_B=torch.tensor([is_real]),
        sampling=SamplingRows.of([request.sampling], torch.device("cpu")),
        acceptance=AcceptanceRows(
            kind_B=torch.tensor([KIND_NUMBERS[speculation.acceptance]]),
            limit_B=torch.tensor([limit]),
            relaxed_top_n_B=torch.tensor([speculation.relaxed_top_n]),
            relaxed_delta_B=torch.tensor([speculation.relaxed_delta], dtype=torch.float32),
        ),
    )
