"""The decode engine of one rank: reserve, activate, step, emit. Runs on the engine thread."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.request import PREEMPTED, Request, SequenceUpdate, TokenFrame
from core.stopping import cut
from decode_node.buckets import Buckets
from decode_node.draft_length import LENGTHS
from decode_node.launcher import InFlight, Launcher
from decode_node.loops import create_loop
from decode_node.rows import Rows
from decode_node.scheduler import Scheduler
from decode_node.sequence import Sequence
from kv_transfer.pages import PagePool
from model.cache import Caches
from model.loaded import LoadedModel
from model.logprobs import LogprobRows
from model.think import thinking_at_start


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a decode engine runs. ``max_pages`` bounds one sequence, None is the whole pool;
    ``loop`` and ``draft_length`` are names (loops.py, draft_length.py); ``buckets`` None suits
    the device."""

    max_rows: int
    max_drafts: int
    max_pages: int | None = None
    loop: str = "auto"
    draft_length: str = "fixed"
    buckets: tuple[int, ...] | None = None


class DecodeEngine:
    """``on_frame`` receives one TokenFrame per step, called on the engine thread.

    The page pool and the caches may be shared with a prefill engine on the same thread.
    ``step_s`` adds up the time of all steps, ``program_s`` that of their tensor programs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: PagePool,
        caches: Caches,
        options: EngineOptions,
        *,
        epoch: int,
        on_frame: Callable[[TokenFrame], None],
    ) -> None:
        self._loaded = loaded
        self._pool = pool
        self._epoch = epoch
        self._on_frame = on_frame
        most = loaded.drafter.max_drafts
        self.max_drafts = options.max_drafts if most is None else min(options.max_drafts, most)
        self.scheduler = Scheduler(
            pool,
            options.max_rows,
            self.max_drafts,
            loaded.max_model_len,
            loaded.config.eos_token_ids,
            options.max_pages,
        )
        self._rows = Rows(
            options.max_rows,
            self.max_drafts + 1,
            pool.num_pages_for(loaded.max_model_len + 2 * (self.max_drafts + 1)),
            loaded.config.hidden_size,
            loaded.dtype,
            loaded.device,
        )
        device_type = loaded.device.type
        buckets = Buckets.of(options.buckets, options.max_rows, device_type)
        self._launcher = Launcher(loaded, caches, self._rows, pool, buckets)
        self._draft_length = LENGTHS[options.draft_length](self.max_drafts)
        self._loop = create_loop(options.loop, device_type, self)
        self.num_steps = 0
        self.num_preempted = 0
        self.step_s = self.program_s = 0.0

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
        output_ids = (*request.output_ids, first_token)
        self._rows.begin(
            sequence.row,
            first_token=first_token,
            hidden_D=hidden_D,
            num_known=len(request.prompt_ids) + sequence.num_output,
            num_output=sequence.num_output,
            limit=sequence.limit,
            pages=sequence.pages,
            sampling=request.sampling,
            speculation=request.speculation,
            is_thinking=thinking_at_start(request.prompt_ids, output_ids, self._loaded.think_ids),
        )
        self._rows.adjust(
            sequence.row,
            request,
            output_ids,
            sequence.stops,
            self._loaded.config.vocab_size,
        )
        sequence.active = True

    def drop(self, request_id: str) -> bool:
        """End a sequence without a word; False if it was gone already."""
        return self.scheduler.drop(request_id) is not None

    def has_work(self) -> bool:
        return not self._loop.is_idle or any(s.active for s in self.scheduler.sequences.values())

    @torch.inference_mode()
    def step(self) -> None:
        """Go on by one step and hand out the frame."""
        began_at = time.perf_counter()
        updates = self._loop.turn()
        self.num_steps += 1
        self._on_frame(self._frame(updates))
        self.step_s += time.perf_counter() - began_at

    def must_preempt(self) -> bool:
        return self.scheduler.must_preempt()

    def make_room(self) -> list[SequenceUpdate]:
        """The preempted go on elsewhere or later, from what they have emitted."""
        preempted = self.scheduler.make_room()
        self.num_preempted += len(preempted)
        return [
            SequenceUpdate(sequence.request.request_id, (), PREEMPTED, counts=sequence.counts())
            for sequence in preempted
        ]

    def launch(self) -> InFlight | None:
        sequences = self.scheduler.runnable()
        if not sequences:
            return None
        num_drafts = self._draft_length.choose([sequence.limit for sequence in sequences])
        step = self._launcher.launch(sequences, num_drafts)
        self.scheduler.launched(sequences)
        return step

    def finish(self, step: InFlight) -> list[SequenceUpdate]:
        result = self._launcher.collect(step)
        self.program_s += result.program_s
        self._draft_length.record(
            step.num_drafts,
            result.program_s,
            [
                (sequence.limit, len(run) - 1)
                for sequence, run in zip(step.sequences, result.runs, strict=True)
            ],
        )
        self.scheduler.landed(step.sequences)
        return [
            self._emit(sequence, i, run, step.num_drafts, result.logprobs)
            for i, (sequence, run) in enumerate(zip(step.sequences, result.runs, strict=True))
            if not sequence.ended
        ]

    def _emit(
        self,
        sequence: Sequence,
        row: int,
        run: tuple[int, ...],
        num_drafts: int,
        logprobs: LogprobRows | None,
    ) -> SequenceUpdate:
        kept, reason = cut(run, sequence.stops, sequence.num_budget)
        sequence.record(min(num_drafts, sequence.limit), len(run) - 1, len(kept))
        sequence.num_output += len(kept)
        request = sequence.request
        if reason is not None:
            self.scheduler.drop(request.request_id)
        told = reason is not None or request.sampling.stop
        counts = sequence.counts() if told else None
        update = SequenceUpdate(request.request_id, kept, reason, counts=counts)
        num_top = request.sampling.logprobs
        if num_top is None:
            return update
        assert logprobs is not None, "somebody asked for log probabilities"
        return replace(update, logprobs=logprobs.of_row(row, len(kept), num_top))

    def _frame(self, updates: list[SequenceUpdate]) -> TokenFrame:
        return TokenFrame(
            epoch=self._epoch,
            step=self.num_steps,
            num_active_rows=len(self.scheduler.sequences),
            num_free_pages=self._pool.num_free,
            updates=tuple(updates),
        )
