"""Row state of a decode rank as tensors. Every running sequence owns one row slot.

Shape legend: R row slots, B active rows, F features, P pages of a row's table.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.core.request import Request, SamplingParams
from tandem.decode_node.planning.states import RunningSequence
from tandem.decode_node.planning.step_plan import GREEDY_TRAITS, SamplingTraits
from tandem.kv_transfer.pages import PagePool
from tandem.model.checkpoint.tensors import map_tensors, select_rows, upload, write_rows
from tandem.model.drafters.base import DrafterState, DrafterTable, Emitted
from tandem.model.loaded import LoadedModel
from tandem.model.sampling.acceptance import ACCEPTANCE_RULES, RULE_NUMBERS
from tandem.model.sampling.acceptance.base import AcceptanceRows
from tandem.model.sampling.adjust import AdjustRows, count_emitted, no_rules, set_rules
from tandem.model.sampling.sampler import SamplingRows
from tandem.text.think import is_thinking_at_start


@dataclass(frozen=True, slots=True)
class RowState:
    """The part of the row tensors that every step updates.

    Attributes:
        last_B1: Last known token.
        num_known_B: Number of prompt and output tokens.
        num_output_B: Number of output tokens.
        thinking_B: Whether the row is in its think phase.
        drafter: State private to the drafter.
    """

    last_B1: Tensor
    num_known_B: Tensor
    num_output_B: Tensor
    thinking_B: Tensor
    drafter: DrafterState


@dataclass(frozen=True, slots=True)
class RowTensors:
    """State and settings of rows between two steps. The first axis of every tensor is the row.

    ``table`` is the drafter's table of all rows. ``rows_B`` are the indices of the selected rows in
    this table, None before rows are selected.
    """

    state: RowState
    page_table_BP: Tensor
    real_B: Tensor
    sampling: SamplingRows
    acceptance: AcceptanceRows
    rows_B: Tensor | None = None
    table: DrafterTable = None


DUMMY_CONTEXT_TOKENS = 512
"""Context length of dummy rows in tokens. Attention is a large part of a step's time, so profiling
needs rows with a realistic context."""


class Rows:
    """Owns the row tensors of a rank. Used on the engine thread only.

    The ``num_rows`` slots of sequences come first, then two padding rows, then ``num_rows`` dummy
    rows. Steps read padding from the first padding row and write it to the second. Padding is
    therefore the same in every step. Page tables are ``width`` pages wide.

    Dummy rows are for profiling. They are computed like real rows with a context of
    DUMMY_CONTEXT_TOKENS tokens, spread over experts and over the pages of ``pool``. Padding and
    dummy rows own no pages: their writes go to the dummy page.
    """

    def __init__(
        self, loaded: LoadedModel, num_rows: int, max_depth: int, pool: PagePool, width: int
    ) -> None:
        self._loaded = loaded
        self._max_depth = max_depth
        self._read_padding = num_rows
        self._write_padding = num_rows + 1
        self._num_rows = num_rows + 2
        self._num_pages = [0] * num_rows
        self._no_pages_1P = torch.zeros(1, width, dtype=torch.int64)
        padding = self._row(_request((0,), 0), is_real=False)
        self._table: RowTensors = map_tensors(
            lambda tensor: tensor.repeat_interleave(2 * num_rows + 2, 0), padding
        )
        for i in range(num_rows):
            self._fill_dummy_row(i, pool)
        self._logit_rules: AdjustRows | None = None
        num_tokens = loaded.max_model_len + max_depth + 1
        self._drafter_table = loaded.drafter.create_table(
            2 * num_rows + 2, num_tokens, loaded.device
        )

    def add_row(
        self, sequence: RunningSequence, first_token: int, features_F: Tensor | None
    ) -> None:
        """Initialize the row of ``sequence``.

        Allocates the logit-rule tensors if the request is the first one that adjusts logits.

        Args:
            first_token: First output token, which is not in the KV cache yet.
            features_F: Drafter features of the tokens before ``first_token``. None if none were
                handed over.
        """
        row = sequence.row
        original = sequence.request
        request = replace(original, output_ids=(*original.output_ids, first_token))
        new = self._row(request, features_F, draft_limit=sequence.draft_limit)
        write_rows(self._table, self._upload([row]), new)
        self._loaded.drafter.register_row(
            self._drafter_table, row, (*request.prompt_ids, *request.output_ids)
        )
        self._num_pages[row] = 0
        self.update_page_table(sequence)
        if request.sampling.adjusts_logits:
            self.allocate_logit_rules()
        if self._logit_rules is not None:
            set_rules(self._logit_rules, row, request, request.output_ids, sequence.stop_ids)

    @torch.inference_mode(False)
    def allocate_logit_rules(self) -> None:
        """Allocate the logit-rule tensors, which steps with logit rules need, unless they exist.

        They are created outside of inference mode, because they are also written outside of it.
        """
        if self._logit_rules is None:
            vocab_size = self._loaded.config.vocab_size
            device = self._loaded.device
            self._logit_rules = no_rules(self._num_rows, vocab_size, device)

    def update_page_table(self, sequence: RunningSequence) -> None:
        """Append the pages that ``sequence`` has gained since the last call to its page table."""
        row = sequence.row
        known = self._num_pages[sequence.row]
        num = len(sequence.pages)
        if num > known:
            self._table.page_table_BP[row, known:num] = self._upload(sequence.pages[known:])
            self._num_pages[row] = num

    def row_indices(
        self, rows: list[int], num_rows: int, is_profile: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the row slots that a step of ``num_rows`` rows reads [B] and writes [B].

        ``rows`` come first, followed by padding rows, or by dummy rows if ``is_profile``.
        """
        num = num_rows - len(rows)
        first = self._num_rows
        more = range(first, first + num) if is_profile else [self._read_padding] * num
        read_B, write_B = self._upload([[*rows, *more], [*rows, *[self._write_padding] * num]])
        return read_B, write_B

    def select(
        self, read_B: Tensor, num_pages: int | None, traits: SamplingTraits = GREEDY_TRAITS
    ) -> RowTensors:
        """Gather the rows ``read_B``. Page tables are ``num_pages`` columns wide (None: all)."""
        pages_BP = self._table.page_table_BP[:, :num_pages]
        rows = select_rows(replace(self._table, page_table_BP=pages_BP), read_B)
        rules = None
        if traits.has_logit_rules:
            assert self._logit_rules is not None, "has_logit_rules is set, but no row has rules"
            rules = select_rows(self._logit_rules, read_B)
        sampler = self._loaded.kernels
        all_greedy = traits.all_greedy
        sampling = replace(rows.sampling, all_greedy=all_greedy, rules=rules, sampler=sampler)
        return replace(rows, sampling=sampling, table=self._drafter_table, rows_B=read_B)

    def store(
        self,
        write_B: Tensor,
        new: RowState,
        emitted: Emitted,
        traits: SamplingTraits = GREEDY_TRAITS,
    ) -> None:
        """Write a step's results to the rows ``write_B``."""
        write_rows(self._table.state, write_B, new)
        self._loaded.drafter.update_table(
            table=self._drafter_table, rows_B=write_B, num_known_B=new.num_known_B, emitted=emitted
        )
        if traits.has_logit_rules:
            assert self._logit_rules is not None, "has_logit_rules is set, but no row has rules"
            count_emitted(
                rules=self._logit_rules,
                rows_B=write_B,
                tokens_BN=emitted.tokens_BE,
                num_emitted_B=emitted.num_B,
            )

    def _fill_dummy_row(self, i: int, pool: PagePool) -> None:
        """Fill dummy row ``i``.

        Tokens of dummy rows are spread over the vocabulary, so that the rows use different experts.
        Each row reads different pages of ``pool``. Shared pages would stay in the fastest cache,
        and steps without drafts would appear to take two thirds of their real time. The pages do
        not include the slots that a step writes.
        """
        num_known = self._loaded.max_model_len // 2
        width = self._no_pages_1P.shape[1]
        prompt_ids = (0,) * (min(DUMMY_CONTEXT_TOKENS, num_known) - 1)
        request = _request(prompt_ids, i * self._loaded.config.vocab_size // len(self._num_pages))
        new = self._row(request, torch.randn(self._loaded.drafter.num_handover_features))
        write_rows(self._table, self._upload([self._num_rows + i]), new)
        num = max(0, min(width, (len(prompt_ids) - 2 * self._max_depth - 1) // pool.page_size))
        pages = [1 + (i * num + j) % (pool.num_pages - 1) for j in range(num)]
        self._table.page_table_BP[self._num_rows + i, :num] = self._upload(pages)

    def _row(
        self,
        request: Request,
        features_F: Tensor | None = None,
        *,
        draft_limit: int = 0,
        is_real: bool = True,
    ) -> RowTensors:
        """Build the tensors of one row. Its last known token is ``request.output_ids[-1]``."""
        speculation = request.speculation
        drafter = self._loaded.drafter
        dtype = self._loaded.dtype
        prompt_ids = request.prompt_ids
        output_ids = request.output_ids
        bounds = [
            getattr(speculation, name) for name in ACCEPTANCE_RULES[speculation.acceptance].bounds
        ]
        is_thinking = is_thinking_at_start(prompt_ids, output_ids, self._loaded.think_ids)
        is_known = features_F is not None
        text = (*prompt_ids, *output_ids)
        known_F = torch.zeros(drafter.num_handover_features) if features_F is None else features_F
        row = RowTensors(
            state=RowState(
                last_B1=torch.tensor([[text[-1]]]),
                num_known_B=torch.tensor([len(text)]),
                num_output_B=torch.tensor([len(output_ids)]),
                thinking_B=torch.tensor([is_thinking]),
                drafter=drafter.init_state(
                    text=text,
                    features_F=known_F.to(dtype),
                    has_features=is_known,
                    max_depth=self._max_depth,
                ),
            ),
            page_table_BP=self._no_pages_1P,
            real_B=torch.tensor([is_real]),
            sampling=SamplingRows.of([request.sampling], torch.device("cpu")),
            acceptance=AcceptanceRows(
                rule_B=torch.tensor([RULE_NUMBERS[speculation.acceptance]]),
                limit_B=torch.tensor([draft_limit]),
                bounds_B2=torch.tensor([bounds], dtype=torch.float32),
            ),
        )
        return upload(row, self._loaded.device)

    def _upload(self, values: list[int] | list[list[int]]) -> Tensor:
        return upload(torch.tensor(values), self._loaded.device)


def _request(prompt_ids: tuple[int, ...], token: int) -> Request:
    return Request(
        request_id="dummy",
        prompt_ids=prompt_ids,
        output_ids=(token,),
        sampling=SamplingParams(seed=0),
    )
