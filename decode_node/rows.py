"""The row slots of one decode rank as tensors; every running sequence owns one row.

Shape legend: R row slots, B active rows, M = n_max + 1, D hidden, P pages of a row's table.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from core.request import Request, SamplingParams, Speculation
from decode_node.copies import to_device
from model.acceptance import KIND_NUMBERS
from model.adjust import AdjustRows, count_emitted, no_rules, set_rules
from model.sampling import SamplingRows

_STRICTLY = Speculation()


@dataclass(frozen=True, slots=True)
class RowTensors:
    """State of rows between two steps; the first axis of every field is the row.

    ``num_known`` is L (prompt and emitted tokens), ``num_output`` how many were emitted in
    all, ``limit`` the most drafts a row may use, ``kind`` the number of its kind of acceptance.
    For the rest see DraftState, SamplingRows, Evidence.
    """

    tokens_BM: Tensor
    hidden_BMD: Tensor
    num_emitted_B: Tensor
    num_known_B: Tensor
    num_output_B: Tensor
    first_B: Tensor
    limit_B: Tensor
    page_table_BP: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    kind_B: Tensor
    thinking_B: Tensor
    relaxed_top_n_B: Tensor
    relaxed_delta_B: Tensor

    def sampling(self, *, all_greedy: bool, rules: AdjustRows | None = None) -> SamplingRows:
        return SamplingRows(
            self.temperature_B,
            self.top_k_B,
            self.top_p_B,
            self.min_p_B,
            self.seed_B,
            all_greedy,
            rules,
        )


class Rows:
    """Owner of the row tensors; used on the engine thread only.

    One row more than there are slots, ``padding_row``, fills batches up: it owns no page, so what
    it writes lands on the dummy page.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        num_pages_per_row: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.padding_row = num_rows
        num_rows += 1

        def ints(*shape: int) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(num_rows, dtype=torch.float32, device=device)

        def flags() -> Tensor:
            return torch.zeros(num_rows, dtype=torch.bool, device=device)

        self._tensors = RowTensors(
            tokens_BM=ints(width),
            hidden_BMD=torch.zeros(num_rows, width, hidden_size, dtype=dtype, device=device),
            num_emitted_B=ints(),
            num_known_B=ints(),
            num_output_B=ints(),
            first_B=flags(),
            limit_B=ints(),
            page_table_BP=ints(num_pages_per_row),
            temperature_B=floats(),
            top_k_B=ints(),
            top_p_B=floats(),
            min_p_B=floats(),
            seed_B=ints(),
            kind_B=ints(),
            thinking_B=flags(),
            relaxed_top_n_B=ints(),
            relaxed_delta_B=floats(),
        )
        self._rules: AdjustRows | None = None
        self._num_rows = num_rows
        self._device = device
        self._num_pages = [0] * num_rows
        self._tensors.num_emitted_B[self.padding_row] = 1
        self._tensors.num_known_B[self.padding_row] = 2

    def begin(
        self,
        row: int,
        *,
        first_token: int,
        hidden_D: Tensor | None,
        num_known: int,
        num_output: int,
        limit: int,
        pages: list[int],
        sampling: SamplingParams,
        speculation: Speculation = _STRICTLY,
        is_thinking: bool = False,
    ) -> None:
        """A sequence enters with one emitted token; without ``hidden_D`` its hidden state is
        zeros and its first pass leaves no trace (zero_hidden)."""
        assert sampling.seed is not None, "a seed is given at admission"
        t = self._tensors
        t.tokens_BM[row] = 0
        t.tokens_BM[row, 0] = first_token
        t.hidden_BMD[row] = 0
        if hidden_D is not None:
            t.hidden_BMD[row, 0] = hidden_D
        t.first_B[row] = hidden_D is None
        t.num_emitted_B[row] = 1
        t.num_known_B[row] = num_known
        t.num_output_B[row] = num_output
        t.limit_B[row] = limit
        t.page_table_BP[row] = 0
        self._num_pages[row] = 0
        self.grow(row, pages)
        t.temperature_B[row] = sampling.temperature
        t.top_k_B[row] = sampling.top_k
        t.top_p_B[row] = sampling.top_p
        t.min_p_B[row] = sampling.min_p
        t.seed_B[row] = sampling.seed
        t.kind_B[row] = KIND_NUMBERS[speculation.acceptance]
        t.thinking_B[row] = is_thinking
        t.relaxed_top_n_B[row] = speculation.relaxed_top_n
        t.relaxed_delta_B[row] = speculation.relaxed_delta

    def adjust(
        self,
        row: int,
        request: Request,
        output_ids: tuple[int, ...],
        stops: frozenset[int],
        vocab_size: int,
    ) -> None:
        """Set the row's logit rules; memory for any is taken when the first request has some."""
        if self._rules is None and request.sampling.adjusts_logits:
            self._rules = no_rules(self._num_rows, vocab_size, self._device)
        if self._rules is not None:
            set_rules(self._rules, row, request, output_ids, stops)

    def rules(self, rows: Tensor) -> AdjustRows:
        assert self._rules is not None, "no row has rules"
        return self._rules.select(rows)

    def grow(self, row: int, pages: list[int]) -> None:
        """The row's page table after its sequence got pages; writes only what is new."""
        known = self._num_pages[row]
        if len(pages) > known:
            new = to_device(pages[known:], self._device)
            self._tensors.page_table_BP[row, known : len(pages)] = new
            self._num_pages[row] = len(pages)

    def select(self, rows: Tensor, num_pages: int) -> RowTensors:
        """State of the active ``rows`` [B], page tables cut to ``num_pages``."""
        picked = {f.name: getattr(self._tensors, f.name)[rows] for f in fields(self._tensors)}
        chosen = RowTensors(**picked)
        return replace(chosen, page_table_BP=chosen.page_table_BP[:, :num_pages])

    def store(self, rows: Tensor, new: RowTensors) -> None:
        """Keep what a step changed."""
        for name in _CHANGED_BY_STEP:
            getattr(self._tensors, name)[rows] = getattr(new, name)
        if self._rules is not None:
            count_emitted(self._rules, rows, new.tokens_BM, new.num_emitted_B)


_CHANGED_BY_STEP = (
    "tokens_BM", "hidden_BMD", "num_emitted_B", "num_known_B", "num_output_B", "first_B",
    "thinking_B",
)  # fmt: skip
