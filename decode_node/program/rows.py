"""The row slots of one decode rank as tensors; every running sequence owns one row.

Shape legend: R row slots, B active rows, F features, P pages of a row's table.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.core.request import Request, SamplingParams
from tandem.decode_node.planning.states import Running
from tandem.decode_node.planning.step_plan import PLAIN, Extras
from tandem.kv_transfer.pages import PagePool
from tandem.model.checkpoint.tensors import each, select, upload, write
from tandem.model.drafters.base import Emitted, Notes, Own
from tandem.model.loaded import LoadedModel
from tandem.model.sampling.acceptance import KIND_NUMBERS, KINDS
from tandem.model.sampling.acceptance.base import AcceptanceRows
from tandem.model.sampling.adjust import AdjustRows, count_emitted, no_rules, set_rules
from tandem.model.sampling.sampler import SamplingRows
from tandem.text.think import thinking_at_start


@dataclass(frozen=True, slots=True)
class RowState:
    """What a step changes. ``num_known`` is L, prompt and emitted tokens, of which ``last`` is the
    last, and ``num_output`` those emitted; ``thinking`` the think phase. What the ``drafter`` keeps
    is its own."""

    last_B1: Tensor
    num_known_B: Tensor
    num_output_B: Tensor
    thinking_B: Tensor
    drafter: Own


@dataclass(frozen=True, slots=True)
class RowTensors:
    """Rows between two steps; the first axis of every tensor is the row. Once they are selected
    ``rows_B`` are their places in the drafter's ``memory``, which is that of all."""

    state: RowState
    page_table_BP: Tensor
    real_B: Tensor
    sampling: SamplingRows
    acceptance: AcceptanceRows
    rows_B: Tensor | None = None
    memory: Notes = None


MADE_UP = 512
"""Tokens of context that rows of trials have: attention is a large part of a step."""


class Rows:
    """Owner of the row tensors; used on the engine thread only.

    Two rows more than there are slots fill batches up: every padding row is read from one and
    written to the other, so padding is the same in every step. Behind these are as many as there
    are slots, made up for trials: computed like real rows with a context of MADE_UP tokens and, as
    these are, spread over experts and over the pages of ``pool``. None of either owns a page: what
    they write lands on the dummy page. Page tables are ``width`` pages wide.
    """

    def __init__(
        self, loaded: LoadedModel, num_rows: int, most_depth: int, pool: PagePool, width: int
    ) -> None:
        self._loaded, self._most_depth = loaded, most_depth
        self._read_padding, self._write_padding = num_rows, num_rows + 1
        self._num_rows, self._num_pages = num_rows + 2, [0] * num_rows
        self._no_pages_1P = torch.zeros(1, width, dtype=torch.int64)
        padding = self._row(_request((0,), 0), is_real=False)
        self._table: RowTensors = each(
            lambda tensor: tensor.repeat_interleave(2 * num_rows + 2, 0), padding
        )
        for i in range(num_rows):
            self._make_up(i, pool)
        self._rules: AdjustRows | None = None
        num_tokens = loaded.max_model_len + most_depth + 1
        self._memory = loaded.drafter.memory(2 * num_rows + 2, num_tokens, loaded.device)

    def begin(self, sequence: Running, first_token: int, features_F: Tensor | None) -> None:
        """``sequence`` enters with ``first_token``, which is not in the cache yet, and the features
        of the tokens before it, None if they were not shipped (zero_hidden). Memory for logit rules
        is taken when the first request, of any rank, has some."""
        row, asked = sequence.row, sequence.request
        request = replace(asked, output_ids=(*asked.output_ids, first_token))
        new = self._row(request, features_F, limit=sequence.limit)
        write(self._table, self._upload([row]), new)
        self._loaded.drafter.enter(self._memory, row, (*request.prompt_ids, *request.output_ids))
        self._num_pages[row] = 0
        self.grow(sequence)
        if request.sampling.adjusts_logits:
            self.hold_rules()
        if self._rules is not None:
            set_rules(self._rules, row, request, request.output_ids, sequence.stops)

    @torch.inference_mode(False)
    def hold_rules(self) -> None:
        """Steps with rules are possible from now on. Also between steps the memory is written to,
        as tensors of inference may not be."""
        if self._rules is None:
            vocab_size, device = self._loaded.config.vocab_size, self._loaded.device
            self._rules = no_rules(self._num_rows, vocab_size, device)

    def grow(self, sequence: Running) -> None:
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
        read_B, write_B = self._upload([[*rows, *more], [*rows, *[self._write_padding] * num]])
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
        return replace(rows, sampling=sampling, memory=self._memory, rows_B=read_B)

    def store(
        self, write_B: Tensor, new: RowState, emitted: Emitted, extras: Extras = PLAIN
    ) -> None:
        """Keep what a step changed."""
        write(self._table.state, write_B, new)
        self._loaded.drafter.note(self._memory, write_B, new.num_known_B, emitted)
        if extras.has_rules:
            assert self._rules is not None, "no row has rules"
            count_emitted(self._rules, write_B, emitted.tokens_BE, emitted.num_B)

    def _make_up(self, i: int, pool: PagePool) -> None:
        """One row of trials; their tokens are far apart, as their experts shall be. It reads pages
        that are others': where rows share one it lies in the fastest cache, and steps without
        drafts seem to take two thirds of their time. None of these has a place that is written."""
        num_known, width = self._loaded.max_model_len // 2, self._no_pages_1P.shape[1]
        prompt_ids = (0,) * (min(MADE_UP, num_known) - 1)
        request = _request(prompt_ids, i * self._loaded.config.vocab_size // len(self._num_pages))
        new = self._row(request, torch.randn(self._loaded.drafter.num_shipped))
        write(self._table, self._upload([self._num_rows + i]), new)
        num = max(0, min(width, (len(prompt_ids) - 2 * self._most_depth - 1) // pool.page_size))
        pages = [1 + (i * num + j) % (pool.num_pages - 1) for j in range(num)]
        self._table.page_table_BP[self._num_rows + i, :num] = self._upload(pages)

    def _row(
        self,
        request: Request,
        features_F: Tensor | None = None,
        *,
        limit: int = 0,
        is_real: bool = True,
    ) -> RowTensors:
        """A row that has just emitted the last of the output ids, on the device."""
        speculation, drafter, dtype = request.speculation, self._loaded.drafter, self._loaded.dtype
        prompt_ids, output_ids = request.prompt_ids, request.output_ids
        bounds = [getattr(speculation, name) for name in KINDS[speculation.acceptance].bounds]
        is_thinking = thinking_at_start(prompt_ids, output_ids, self._loaded.think_ids)
        is_known, text = features_F is not None, (*prompt_ids, *output_ids)
        known_F = torch.zeros(drafter.num_shipped) if features_F is None else features_F
        row = RowTensors(
            state=RowState(
                last_B1=torch.tensor([[text[-1]]]),
                num_known_B=torch.tensor([len(text)]),
                num_output_B=torch.tensor([len(output_ids)]),
                thinking_B=torch.tensor([is_thinking]),
                drafter=drafter.begin(text, known_F.to(dtype), is_known, self._most_depth),
            ),
            page_table_BP=self._no_pages_1P,
            real_B=torch.tensor([is_real]),
            sampling=SamplingRows.of([request.sampling], torch.device("cpu")),
            acceptance=AcceptanceRows(
                kind_B=torch.tensor([KIND_NUMBERS[speculation.acceptance]]),
                limit_B=torch.tensor([limit]),
                bounds_B2=torch.tensor([bounds], dtype=torch.float32),
            ),
        )
        return upload(row, self._loaded.device)

    def _upload(self, values: list[int] | list[list[int]]) -> Tensor:
        return upload(torch.tensor(values), self._loaded.device)


def _request(prompt_ids: tuple[int, ...], token: int) -> Request:
    return Request("nobody's", prompt_ids, (token,), SamplingParams(seed=0))
