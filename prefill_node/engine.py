"""The prefill engine of one rank: prompt to cache pages, first token and last hidden state.

Runs on the engine thread. Shape legend: T tokens of a step, G chunks of it, E of these that end
their prompt, D hidden, F features.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import NonFiniteLogits, PoisonRequest, StepFailed, TandemError
from tandem.core.identity import Identity
from tandem.core.request import Request, TokenLogprobs
from tandem.core.stopping import stop_ids
from tandem.model.checkpoint.tensors import upload
from tandem.model.drafters.base import UNKNOWN_TOKEN
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, Segment, Segments, pack_segments
from tandem.model.sampling.adjust import no_rules, set_rules
from tandem.model.sampling.logprobs import raw_logprobs
from tandem.model.sampling.sampler import SamplingRows, apply_rules, draw
from tandem.prefill_node.page_source import PageSource
from tandem.prefill_node.planner import max_num_tokens
from tandem.prefill_node.scheduler import Chunk, Scheduler
from tandem.prefill_node.sequence import PrefillSequence
from tandem.runtime.engine_loop import is_fatal
from tandem.runtime.lockstep import Planner
from tandem.runtime.parts import RankParts

log = logging.getLogger(__name__)
PromptResult = tuple[int, tuple[TokenLogprobs, ...], Tensor | None]
"""Of a prompt that has ended: first token or NO_TOKEN, its log probabilities, features [F]."""
NO_TOKEN = -1
"""Stands for a first token whose logits are not finite."""


@dataclass(frozen=True, slots=True)
class Progress:
    """After a chunk of a sequence, which says how far it is computed.

    With the last one ``first_token`` is sampled (``logprobs`` are its own, if asked for) and
    ``features_F`` are what the drafter wants of the last tokens, None if it wants nothing.
    """

    sequence: PrefillSequence
    first_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    features_F: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A step's inputs; ``requests`` are those whose prompts end in it."""

    requests: list[Request]
    batch: Batch
    next_GK: Tensor
    ended_E: Tensor
    num_output_E: Tensor
    sampling: SamplingRows


class PrefillEngine:
    """``on_progress`` is told of every computed chunk, ``on_failed`` of every prompt whose step
    raised, both on the engine thread. Prompts get pages from ``pages``, by default from the pool.
    ``planner`` is asked in every step, by default that of the rank's gang."""

    def __init__(
        self,
        parts: RankParts,
        on_progress: Callable[[Progress], None],
        on_failed: Callable[[Identity, TandemError], None],
        pages: PageSource | None = None,
        planner: Planner[int, int] | None = None,
    ) -> None:
        self._loaded, self._caches = parts.loaded, parts.caches
        self._page_size = parts.pool.page_size
        self._on_progress = on_progress
        self._on_failed = on_failed
        self._crash_journal, self._counters = parts.loop.crash_journal, parts.counters
        self._counters["num_non_finite"] = 0
        self._chunks: list[Chunk] = []
        max_batch_tokens = parts.config.prefill.max_num_batched_tokens
        pages = pages or PageSource(parts.pool, parts.loaded.lag)
        self._num_lookahead = max(1, parts.loaded.lag)
        self.scheduler = Scheduler(pages, max_batch_tokens, self._num_lookahead)
        self._planner = planner or parts.lockstep.planner(
            max_num_tokens, (int, int), parts.loop.wake
        )
        self.num_steps = 0

    def has_work(self) -> bool:
        return self.scheduler.num_waiting > 0 or self._planner.is_step_requested

    @torch.inference_mode()
    def step(self) -> None:
        """Propose → plan → launch: the next chunks in one forward, or a dummy for other ranks'."""
        self._chunks = self.scheduler.next_chunks()
        plan = self._planner.plan(sum(chunk.num_tokens for chunk in self._chunks))
        if plan.key is not None:
            inputs = self._prepare_inputs(plan.key)
            self._record_in_flight(self._chunks)
            with self._planner.collective_section(), self._planner.waiting_for_device():
                ends = self._compute(inputs)
            self._report_progress(self._chunks, ends)
            self._record_in_flight([])
        self.num_steps += 1

    def fail(self, error: Exception) -> None:
        """The prompts of the step that raised this are given up."""
        for chunk in self._chunks:
            sequence = chunk.sequence
            self.scheduler.stop_computing(sequence)
            failed = PoisonRequest if sequence.is_suspect else StepFailed
            text = f"{sequence.identity}: a prefill step failed: {error!r}"
            self._on_failed(sequence.identity, failed(text))
        self._record_in_flight([])

    def close(self) -> None:
        """It keeps no programs."""

    def _record_in_flight(self, chunks: list[Chunk]) -> None:
        sequences = [chunk.sequence for chunk in chunks]
        is_isolated = any(sequence.is_suspect for sequence in sequences)
        self._crash_journal.record_in_flight(
            "prefill", (sequence.identity for sequence in sequences), is_isolated
        )

    def _prepare_inputs(self, num_rows: int) -> PrefillInputs:
        """All that the chosen chunks need. If that fails they are given up, and the step that was
        agreed upon is a dummy that leaves no trace."""
        try:
            return self._build_inputs(self._chunks, num_rows)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("a prefill step cannot be prepared")
            self.fail(error)
            self._chunks = []
            return self._build_inputs([], num_rows)

    def _build_inputs(self, chunks: list[Chunk], num_rows: int) -> PrefillInputs:
        """``num_rows`` of the forward where all ranks need as many, else as many as there are."""
        for chunk in chunks:
            if chunk.lo == chunk.sequence.num_cached:
                chunk.sequence.started_at = time.monotonic()
        requests = [chunk.sequence.request for chunk in chunks if chunk.is_last]
        min_rows = num_rows if self._loaded.dispatch.pads_tokens else 1
        segments = [_segment(chunk) for chunk in chunks]
        return PrefillInputs(
            requests,
            batch=pack_segments(segments, self._page_size, self._loaded.device, min_rows),
            next_GK=self._ints(self._next_tokens(chunk) for chunk in chunks).view(
                -1, self._num_lookahead
            ),
            ended_E=self._ints(i for i, chunk in enumerate(chunks) if chunk.is_last),
            num_output_E=self._ints(len(request.output_ids) for request in requests),
            sampling=sampling_rows(requests, self._loaded),
        )

    def _compute(self, inputs: PrefillInputs) -> Iterator[PromptResult]:
        """Main model, first tokens, drafter. Logits are those of the last tokens of prompts that
        end here, taken once."""
        network, segments = self._loaded.network, inputs.batch.segments
        assert segments is not None, "a packed batch has segments"
        drafter = self._loaded.drafter
        hidden_1TD, features_1TF = network.forward_with_taps(
            inputs.batch, self._caches, drafter.taps
        )
        logits_EV = network.logits(hidden_1TD[0, segments.ends_G[inputs.ended_E] - 1])
        no_drafts = inputs.ended_E.new_empty(len(inputs.requests), 0)
        adjusted_EV = apply_rules(logits_EV, inputs.sampling, inputs.num_output_E, no_drafts)
        tokens_E = draw(adjusted_EV, inputs.sampling, inputs.num_output_E)
        next_GK = inputs.next_GK.clone()
        next_GK[inputs.ended_E, 0] = tokens_E
        drafter.prefill(inputs.batch, next_GK, features_1TF, self._caches)
        logprobs = _logprobs(inputs.requests, logits_EV, tokens_E)
        features_EF: Iterable[Tensor | None] = [None] * len(inputs.requests)
        if drafter.num_features:
            features_EF = last_rows(
                features_1TF[0], segments, inputs.ended_E, drafter.num_feature_tokens
            )
        first_tokens_E = tokens_E.where(inputs.sampling.sampler.are_finite(adjusted_EV), NO_TOKEN)
        return zip(first_tokens_E.tolist(), logprobs, features_EF, strict=True)

    def _next_tokens(self, chunk: Chunk) -> list[int]:
        """As many tokens behind it as cache entries may depend on."""
        known = chunk.sequence.token_ids[chunk.hi : chunk.hi + self._num_lookahead]
        return [*known, *[UNKNOWN_TOKEN] * (self._num_lookahead - len(known))]

    def _ints(self, values: Iterable[int | list[int]]) -> Tensor:
        return upload(torch.tensor(list(values), dtype=torch.int64), self._loaded.device)

    def _report_progress(self, chunks: list[Chunk], ends: Iterator[PromptResult]) -> None:
        for chunk in chunks:
            end = next(ends) if chunk.is_last else ()
            if end and end[0] == NO_TOKEN:
                self._end_broken(chunk.sequence)
                continue
            progress = Progress(chunk.sequence, *end)
            self.scheduler.advance(chunk, progress.first_token)
            self._on_progress(progress)

    def _end_broken(self, sequence: PrefillSequence) -> None:
        """End a prompt whose logits are not finite. Nothing of it was published; pages that it
        had from the prefix cache may be the cause, so they are forgotten there."""
        self.scheduler.stop_computing(sequence)
        self.scheduler.evict_pages(sequence)
        self._counters["num_non_finite"] += 1
        error = NonFiniteLogits.of(sequence.identity, len(sequence.token_ids))
        log.error("%s", error)
        self._on_failed(sequence.identity, error)


def last_rows(x_TF: Tensor, segments: Segments, ended_E: Tensor, num: int) -> Tensor:
    """Of the ``num`` last tokens of prompts that end, in order: [E, num * F]. A segment has fewer
    where the prompt has: then the first are zeros."""
    starts_G = segments.ends_G - segments.ends_G.new_tensor(segments.lengths)
    back_K = torch.arange(-num, 0, device=ended_E.device)
    at_EK = segments.ends_G[ended_E].unsqueeze(1) + back_K
    is_there_EK1 = (at_EK >= starts_G[ended_E].unsqueeze(1)).unsqueeze(2)
    return x_TF[at_EK.clamp(min=0)].where(is_there_EK1, 0).flatten(1)


def _segment(chunk: Chunk) -> Segment:
    sequence = chunk.sequence
    return Segment(sequence.token_ids[chunk.lo : chunk.hi], chunk.lo, sequence.pages)


def _logprobs(
    requests: list[Request], logits_EV: Tensor, tokens_E: Tensor
) -> list[tuple[TokenLogprobs, ...]]:
    """Of each first token, () for requests that did not ask."""
    num_logprobs = [request.sampling.logprobs for request in requests]
    max_logprobs = max((num for num in num_logprobs if num is not None), default=None)
    if max_logprobs is None:
        return [()] * len(requests)
    rows = raw_logprobs(logits_EV.unsqueeze(1), tokens_E.unsqueeze(1), max_logprobs)
    return [() if num is None else rows.of_row(i, 1, num) for i, num in enumerate(num_logprobs)]


def sampling_rows(requests: list[Request], loaded: LoadedModel) -> SamplingRows:
    """The requests' settings, one row each."""
    settings, rules = [request.sampling for request in requests], None
    if any(one.adjusts_logits for one in settings):
        rules = no_rules(len(requests), loaded.config.vocab_size, loaded.device)
        for row, request in enumerate(requests):
            stops = stop_ids(request.sampling, loaded.config.eos_token_ids)
            set_rules(rules, row, request, request.output_ids, stops)
    return SamplingRows.of(settings, loaded.device, rules, loaded.kernels)
