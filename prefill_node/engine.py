"""The prefill engine of one rank: prompt to cache pages, first token and last hidden state.

Runs on the engine thread. Shape legend: B chunks of a batch, Q tokens of the
longest, D hidden, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.request import Request, TokenLogprobs
from core.stopping import stop_ids
from kv_transfer.pages import PagePool
from model.adjust import no_rules, set_rules
from model.batch import DUMMY_PAGE, Batch, PromptRows
from model.cache import Caches
from model.loaded import LoadedModel
from model.logprobs import raw_logprobs
from model.sampling import SamplingRows, choose
from prefill_node.scheduler import Chunk, Key, Scheduler
from prefill_node.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """After a chunk: ``num_tokens`` slots are computed, per cache group.

    With the last one ``first_token`` is sampled (``logprobs`` are its own, if asked for) and
    ``hidden_D`` is the main model's hidden state of the last token. ``started_at`` is the
    monotonic time the first chunk began at.
    """

    key: Key
    pages: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_cached: int
    started_at: float
    first_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_D: Tensor | None = None


class PrefillEngine:
    """``on_progress`` is told of every computed chunk, on the engine thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: PagePool,
        caches: Caches,
        *,
        max_batch_tokens: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._loaded = loaded
        self._caches = caches
        self._page_size = pool.page_size
        self._on_progress = on_progress
        self.scheduler = Scheduler(pool, max_batch_tokens)
        self.num_steps = 0

    def submit(self, request: Request, attempt: int) -> Sequence:
        """Queue a prompt; see Scheduler.admit for what it raises."""
        return self.scheduler.admit(request, attempt)

    def drop(self, key: Key) -> None:
        self.scheduler.drop(key)

    def has_work(self) -> bool:
        return self.scheduler.num_waiting > 0

    @torch.inference_mode()
    def step(self) -> None:
        """Compute the next chunks: main model, then the drafter's rows over shifted tokens."""
        for chunks in alike(self.scheduler.next_chunks()):
            self._compute(chunks)
        self.num_steps += 1

    def _compute(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.lo == chunk.sequence.num_cached:
                chunk.sequence.started_at = time.monotonic()
        rows = self._rows(chunks)
        hidden_BQD = self._loaded.network(self._main_batch(chunks, rows), self._caches)
        first_tokens = [
            self._first_token(chunk, hidden_BQD[i, chunk.num_tokens - 1].unsqueeze(0))
            if chunk.is_last
            else None
            for i, chunk in enumerate(chunks)
        ]
        self._run_drafter(chunks, rows, hidden_BQD, first_tokens)
        for i, (chunk, first_token) in enumerate(zip(chunks, first_tokens, strict=True)):
            self.scheduler.advance(chunk, first_token)
            hidden_D = hidden_BQD[i, chunk.num_tokens - 1].clone() if chunk.is_last else None
            self._on_progress(self._progress(chunk, first_token, hidden_D))

    def _progress(self, chunk: Chunk, first_token: int | None, hidden_D: Tensor | None) -> Progress:
        sequence = chunk.sequence
        return Progress(
            key=(sequence.request.request_id, sequence.attempt),
            pages=tuple(sequence.pages),
            num_tokens=(chunk.hi,) * len(self._caches),
            num_cached=sequence.num_cached,
            started_at=sequence.started_at,
            first_token=first_token,
            logprobs=self._logprobs(sequence.request, first_token, hidden_D),
            hidden_D=hidden_D,
        )

    def _logprobs(
        self, request: Request, token: int | None, hidden_D: Tensor | None
    ) -> tuple[TokenLogprobs, ...]:
        num_top = request.sampling.logprobs
        if num_top is None or token is None or hidden_D is None:
            return ()
        logits_1V = self._loaded.network.logits(hidden_D.unsqueeze(0))
        token_11 = torch.tensor([[token]], device=hidden_D.device)
        return raw_logprobs(logits_1V.unsqueeze(0), token_11, num_top).of_row(0, 1, num_top)

    def _rows(self, chunks: list[Chunk]) -> PromptRows:
        """Chunks as rows of one batch, padded to the longest; padding leaves no trace."""
        device = self._loaded.device
        longest = max(chunk.num_tokens for chunk in chunks)
        num_pages = max(-(-chunk.hi // self._page_size) for chunk in chunks)
        tables = [(c.sequence.pages + [DUMMY_PAGE] * num_pages)[:num_pages] for c in chunks]
        offsets = torch.arange(longest, device=device)
        lo_B1 = torch.tensor([[chunk.lo] for chunk in chunks], device=device)
        length_B1 = torch.tensor([[chunk.num_tokens] for chunk in chunks], device=device)
        return PromptRows(
            slots_BQ=lo_B1 + offsets,
            keep_BQ=offsets < length_B1,
            page_table_BP=torch.tensor(tables, device=device),
        )

    def _main_batch(self, chunks: list[Chunk], rows: PromptRows) -> Batch:
        ids = [chunk.sequence.token_ids[chunk.lo : chunk.hi] for chunk in chunks]
        return rows.batch(self._padded(ids, rows), 0, self._page_size)

    def _padded(self, ids: list[tuple[int, ...]], rows: PromptRows) -> Tensor:
        width = rows.slots_BQ.shape[1]
        padded = [[*row, *[0] * (width - len(row))] for row in ids]
        return torch.tensor(padded, device=self._loaded.device)

    def _first_token(self, chunk: Chunk, hidden_1D: Tensor) -> int:
        request = chunk.sequence.request
        num_output = torch.tensor([len(request.output_ids)], device=self._loaded.device)
        rows = sampling_rows(request, self._loaded)
        no_drafts = num_output.new_empty(1, 0)
        return int(choose(self._loaded.network.logits(hidden_1D), rows, num_output, no_drafts))

    def _run_drafter(
        self,
        chunks: list[Chunk],
        rows: PromptRows,
        hidden_BQD: Tensor,
        first_tokens: list[int | None],
    ) -> None:
        """Draft rows [lo, hi): row i takes token i + 1, the last row of all the first token."""
        next_ids = []
        for chunk, first_token in zip(chunks, first_tokens, strict=True):
            known = chunk.sequence.token_ids[chunk.lo + 1 : chunk.hi + 1]
            next_ids.append(known if first_token is None else (*known, first_token))
        ids_BQ = self._padded(next_ids, rows)
        self._loaded.drafter.prefill(ids_BQ, hidden_BQD, rows, self._caches)


def alike(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Chunks that may share a batch: none is padded to more than twice its length."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: -chunk.num_tokens):
        if groups and 2 * chunk.num_tokens >= groups[-1][0].num_tokens:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def sampling_rows(request: Request, loaded: LoadedModel) -> SamplingRows:
    """The request's settings as one row."""
    sampling, device, rules = request.sampling, loaded.device, None
    if sampling.adjusts_logits:
        rules = no_rules(1, loaded.config.vocab_size, device)
        stops = stop_ids(sampling, loaded.config.eos_token_ids)
        set_rules(rules, 0, request, request.output_ids, stops)
    assert sampling.seed is not None, "a seed is given at admission"
    return SamplingRows(
        temperature_B=torch.tensor([sampling.temperature], device=device),
        top_k_B=torch.tensor([sampling.top_k], device=device),
        top_p_B=torch.tensor([sampling.top_p], device=device),
        min_p_B=torch.tensor([sampling.min_p], device=device),
        seed_B=torch.tensor([sampling.seed], device=device),
        all_greedy=sampling.temperature == 0,
        rules=rules,
    )
