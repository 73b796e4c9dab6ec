"""The decode engine of one rank: reserve, activate, step, emit. Runs on the engine thread."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from core.request import PREEMPTED, Request, SequenceUpdate, TokenFrame
from core.stopping import cut
from decode_node.rows import Rows
from decode_node.scheduler import Scheduler
from decode_node.sequence import Sequence
from decode_node.step import StepOutput, decode_step
from kv_transfer.pages import PagePool
from model.cache import Caches
from model.loaded import LoadedModel
from model.logprobs import LogprobRows


class DecodeEngine:
    """``on_frame`` receives one TokenFrame per step, called on the engine thread. ``max_pages``
    bounds one sequence, None is the whole pool.

    The page pool and the caches may be shared with a prefill engine on the same thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: PagePool,
        caches: Caches,
        *,
        max_rows: int,
        max_drafts: int,
        epoch: str,
        on_frame: Callable[[TokenFrame], None],
        max_pages: int | None = None,
    ) -> None:
        self._loaded = loaded
        self._pool = pool
        self._caches = caches
        self._epoch = epoch
        self._on_frame = on_frame
        if loaded.drafter.max_drafts is not None:
            max_drafts = min(max_drafts, loaded.drafter.max_drafts)
        self.max_drafts = max_drafts
        self.scheduler = Scheduler(
            pool,
            max_rows,
            max_drafts,
            loaded.max_model_len,
            loaded.config.eos_token_ids,
            max_pages,
        )
        self._rows = Rows(
            max_rows,
            max_drafts + 1,
            pool.num_pages_for(loaded.max_model_len + 2 * (max_drafts + 1)),
            loaded.config.hidden_size,
            loaded.dtype,
            loaded.device,
        )
        self.num_steps = 0

    def reserve(self, request: Request) -> Sequence:
        """Row and pages for ``request``; see Scheduler.admit for what it raises."""
        return self.scheduler.admit(request)

    def activate(self, request_id: str, first_token: int, hidden_D: Tensor | None) -> None:
        """Start stepping a sequence whose cache is complete.

        ``first_token`` was already emitted by the prefill node. ``hidden_D`` is the main
        model's hidden state [D] of the last prompt token, None for zero_hidden.
        """
        sequence = self.scheduler.sequences[request_id]
        request = sequence.request
        sequence.num_output += 1
        self._rows.begin(
            sequence.row,
            first_token=first_token,
            hidden_D=hidden_D,
            num_known=len(request.prompt_ids) + sequence.num_output,
            num_output=sequence.num_output,
            limit=sequence.limit,
            pages=sequence.pages,
            sampling=request.sampling,
        )
        self._rows.adjust(
            sequence.row,
            request,
            (*request.output_ids, first_token),
            sequence.stops,
            self._loaded.config.vocab_size,
        )
        sequence.active = True

    def drop(self, request_id: str) -> bool:
        """End a sequence without a word; False if it was gone already."""
        return self.scheduler.drop(request_id) is not None

    def has_work(self) -> bool:
        return any(s.active for s in self.scheduler.sequences.values())

    @torch.inference_mode()
    def step(self) -> None:
        """Advance every active row once and hand out the frame."""
        updates = [self._preempt(sequence) for sequence in self.scheduler.make_room()]
        active = self.scheduler.active()
        if active:
            updates += self._advance(active)
        self.num_steps += 1
        self._on_frame(self._frame(updates))

    def _advance(self, active: list[Sequence]) -> list[SequenceUpdate]:
        for sequence in active:
            self._rows.grow(sequence.row, sequence.pages)
        num_drafts = self.scheduler.num_drafts(active)
        output = self._run(active, num_drafts)
        tokens = output.verdict.tokens_BN1.tolist()
        num_accepted = output.verdict.num_accepted_B.tolist()
        updates = [
            self._emit(sequence, tuple(row[: accepted + 1]), num_drafts)
            for sequence, row, accepted in zip(active, tokens, num_accepted, strict=True)
        ]
        if output.logprobs is None:
            return updates
        return [
            _with_logprobs(sequence, update, output.logprobs, i)
            for i, (sequence, update) in enumerate(zip(active, updates, strict=True))
        ]

    def _preempt(self, sequence: Sequence) -> SequenceUpdate:
        """Tell that the sequence must go on elsewhere or later, from what it has emitted."""
        request_id = sequence.request.request_id
        return SequenceUpdate(request_id, (), PREEMPTED, counts=sequence.counts())

    def _run(self, active: list[Sequence], num_drafts: int) -> StepOutput:
        longest = max(len(s.request.prompt_ids) + s.num_output for s in active)
        num_pages = self._pool.num_pages_for(longest + num_drafts)
        index = torch.tensor([s.row for s in active], device=self._loaded.device)
        plain = not any(s.request.sampling.adjusts_logits for s in active)
        asked = [s.request.sampling.logprobs for s in active]
        output = decode_step(
            self._loaded.network,
            self._loaded.drafter,
            self._caches,
            self._rows.select(index, num_pages),
            num_drafts,
            all_greedy=all(s.request.sampling.temperature == 0 for s in active),
            rules=None if plain else self._rows.rules(index),
            num_logprobs=max((num for num in asked if num is not None), default=None),
        )
        self._rows.store(index, output.rows)
        return output

    def _emit(
        self, sequence: Sequence, token_ids: tuple[int, ...], num_drafts: int
    ) -> SequenceUpdate:
        kept, reason = cut(token_ids, sequence.stops, sequence.num_budget)
        sequence.record(min(num_drafts, sequence.limit), len(token_ids) - 1, len(kept))
        sequence.num_output += len(kept)
        request = sequence.request
        if reason is not None:
            self.scheduler.drop(request.request_id)
        told = reason is not None or request.sampling.stop
        counts = sequence.counts() if told else None
        return SequenceUpdate(request.request_id, kept, reason, counts=counts)

    def _frame(self, updates: list[SequenceUpdate]) -> TokenFrame:
        return TokenFrame(
            epoch=self._epoch,
            step=self.num_steps,
            num_active_rows=len(self.scheduler.sequences),
            num_free_pages=self._pool.num_free,
            updates=tuple(updates),
        )


def _with_logprobs(
    sequence: Sequence, update: SequenceUpdate, logprobs: LogprobRows, row: int
) -> SequenceUpdate:
    num_top = sequence.request.sampling.logprobs
    if num_top is None:
        return update
    return replace(update, logprobs=logprobs.of_row(row, len(update.token_ids), num_top))
