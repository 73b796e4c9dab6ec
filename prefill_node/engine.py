"""The prefill engine of one rank: prompt to cache pages, first token and last hidden state.

Runs on the engine thread. Shape legend: Q tokens of a chunk, D hidden, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.request import Request
from kv_transfer.pages import PagePool
from model.batch import Batch, physical_slots
from model.cache import Caches
from model.loaded import LoadedModel
from model.sampling import SamplingRows, choose
from prefill_node.scheduler import Chunk, Key, Scheduler
from prefill_node.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """After a chunk: ``num_tokens`` slots are computed, per cache group.

    With the last one ``first_token`` is sampled and ``hidden_D`` is the main model's hidden
    state of the last token. ``started_at`` is the monotonic time the first chunk began at.
    """

    key: Key
    pages: tuple[int, ...]
    num_tokens: tuple[int, ...]
    started_at: float
    first_token: int | None = None
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
        """Compute one chunk: main model, then the drafter's rows over the shifted tokens."""
        chunk = self.scheduler.next_chunk()
        if chunk is None:
            return
        if chunk.lo == 0:
            chunk.sequence.started_at = time.monotonic()
        page_table = torch.tensor([chunk.sequence.pages], device=self._loaded.device)
        hidden_1QD = self._run_main(chunk, page_table)
        first_token = self._first_token(chunk, hidden_1QD[:, -1]) if chunk.is_last else None
        self._run_drafter(chunk, page_table, hidden_1QD, first_token)
        self.num_steps += 1
        self.scheduler.advance(chunk)
        self._on_progress(
            Progress(
                key=(chunk.sequence.request.request_id, chunk.sequence.attempt),
                pages=tuple(chunk.sequence.pages),
                num_tokens=(chunk.hi,) * len(self._caches),
                started_at=chunk.sequence.started_at,
                first_token=first_token,
                hidden_D=hidden_1QD[0, -1].clone() if chunk.is_last else None,
            )
        )

    def _run_main(self, chunk: Chunk, page_table: Tensor) -> Tensor:
        device = self._loaded.device
        slots = torch.arange(chunk.lo, chunk.hi, device=device).unsqueeze(0)
        keep = torch.ones_like(slots, dtype=torch.bool)
        ids = torch.tensor([chunk.sequence.token_ids[chunk.lo : chunk.hi]], device=device)
        context = page_table[:, : -(-chunk.hi // self._page_size)]
        batch = Batch(
            token_ids_BQ=ids,
            positions_BQ=slots,
            write_slots_BQ=physical_slots(page_table, slots, keep, self._page_size),
            context_lens_BQ=slots + 1,
            page_table_BP=context,
            expanded=True,
        )
        return self._loaded.network(batch, self._caches)

    def _first_token(self, chunk: Chunk, hidden_1D: Tensor) -> int:
        request = chunk.sequence.request
        index = torch.tensor([len(request.output_ids)], device=self._loaded.device)
        rows = sampling_rows(request, self._loaded.device)
        return int(choose(self._loaded.network.logits(hidden_1D), rows, index))

    def _run_drafter(
        self, chunk: Chunk, page_table: Tensor, hidden_1QD: Tensor, first_token: int | None
    ) -> None:
        """Draft rows [lo, hi): row i takes token i + 1, the last row of all the first token."""
        next_ids = list(chunk.sequence.token_ids[chunk.lo + 1 : chunk.hi + 1])
        if first_token is not None:
            next_ids.append(first_token)
        ids_1Q = torch.tensor([next_ids], device=self._loaded.device)
        context = page_table[:, : -(-chunk.hi // self._page_size)]
        self._loaded.drafter.prefill(ids_1Q, hidden_1QD, chunk.lo, context, self._caches)


def sampling_rows(request: Request, device: torch.device) -> SamplingRows:
    """The request's settings as one row."""
    sampling = request.sampling
    assert sampling.seed is not None, "a seed is given at admission"
    return SamplingRows(
        temperature_B=torch.tensor([sampling.temperature], device=device),
        top_k_B=torch.tensor([sampling.top_k], device=device),
        top_p_B=torch.tensor([sampling.top_p], device=device),
        min_p_B=torch.tensor([sampling.min_p], device=device),
        seed_B=torch.tensor([sampling.seed], device=device),
        all_greedy=sampling.temperature == 0,
    )
