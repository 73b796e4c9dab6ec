"""The prefill engine of one rank: computes prompts into cache pages and samples first tokens.

Runs on the engine thread.

Shape legend:
    T: tokens of a step
    G: chunks of a step
    E: chunks that end their prompts
    D: hidden size
    F: features
    V: vocabulary
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
"""Result of a completed prompt: first token or NO_TOKEN, its log probabilities, and drafter
features [F] or None."""
NO_TOKEN = -1
"""Placeholder for a first token whose logits are not finite."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Progress of a sequence after a chunk.

    After the last chunk, ``first_token`` is the sampled token, with its ``logprobs`` if requested.
    ``features_F`` then holds the features of the last prompt tokens that the drafter needs, or None
    if it needs none.
    """

    sequence: PrefillSequence
    first_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    features_F: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Inputs of a prefill step.

    Attributes:
        requests: Requests whose prompts end in the step.
        next_GK: The K tokens after each chunk, UNKNOWN_TOKEN after the end of a prompt.
        ended_E: Indices of the chunks that end their prompts.
        num_output_E: Number of output tokens that each of ``requests`` already has, if it resumes.
        sampling: Sampling settings of each of ``requests``.
    """

    requests: list[Request]
    batch: Batch
    next_GK: Tensor
    ended_E: Tensor
    num_output_E: Tensor
    sampling: SamplingRows


class PrefillEngine:
    """Computes the prompts of a rank, in chunks.

    ``on_progress`` is called after every computed chunk, ``on_failed`` for every prompt whose step
    failed or whose logits are not finite. Both are called on the engine thread.

    ``pages`` allocates the pages of prompts, by default from the rank's pool. ``planner`` agrees on
    every step with the other ranks. By default, it is the planner of the rank's gang.
    """

    def __init__(
        self,
        parts: RankParts,
        on_progress: Callable[[ChunkResult], None],
        on_failed: Callable[[Identity, TandemError], None],
        pages: PageSource | None = None,
        planner: Planner[int, int] | None = None,
    ) -> None:
        self._loaded = parts.loaded
        self._caches = parts.caches
        self._page_size = parts.pool.page_size
        self._on_progress = on_progress
        self._on_failed = on_failed
        self._crash_journal = parts.loop.crash_journal
        self._counters = parts.counters
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
        """Run one step: propose, get the plan, compute the next chunks in one forward pass.

        Without chunks, the rank runs a dummy forward pass if other ranks have work.
        """
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
        """Fail all prompts of the step that raised ``error``."""
        for chunk in self._chunks:
            sequence = chunk.sequence
            self.scheduler.stop_computing(sequence)
            failed = PoisonRequest if sequence.is_suspect else StepFailed
            text = f"{sequence.identity}: a prefill step failed: {error!r}"
            self._on_failed(sequence.identity, failed(text))
        self._record_in_flight([])

    def close(self) -> None:
        """Do nothing: the prefill engine keeps no compiled programs."""

    def _record_in_flight(self, chunks: list[Chunk]) -> None:
        sequences = [chunk.sequence for chunk in chunks]
        is_isolated = any(sequence.is_suspect for sequence in sequences)
        self._crash_journal.record_in_flight(
            "prefill", (sequence.identity for sequence in sequences), is_isolated
        )

    def _prepare_inputs(self, num_rows: int) -> PrefillInputs:
        """Build the inputs of the step's chunks.

        If that fails, the prompts of these chunks fail, and the inputs of a dummy step are
        returned. The rank must run the agreed step in any case, because the other ranks run it.
        """
        try:
            return self._build_inputs(self._chunks, num_rows)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("inputs of a prefill step cannot be built; failing its prompts")
            self.fail(error)
            self._chunks = []
            return self._build_inputs([], num_rows)

    def _build_inputs(self, chunks: list[Chunk], num_rows: int) -> PrefillInputs:
        """Pack ``chunks`` into one batch.

        The batch is padded to ``num_rows`` tokens if the MoE dispatch needs equal sizes on all
        ranks.
        """
        for chunk in chunks:
            if chunk.lo == chunk.sequence.num_cached:
                chunk.sequence.started_at = time.monotonic()
        requests = [chunk.sequence.request for chunk in chunks if chunk.is_last]
        min_rows = num_rows if self._loaded.dispatch.pads_tokens else 1
        segments = [_segment(chunk) for chunk in chunks]
        return PrefillInputs(
            requests,
            batch=pack_segments(
                segments=segments,
                page_size=self._page_size,
                device=self._loaded.device,
                num_rows=min_rows,
            ),
            next_GK=self._ints(self._next_tokens(chunk) for chunk in chunks).view(
                -1, self._num_lookahead
            ),
            ended_E=self._ints(i for i, chunk in enumerate(chunks) if chunk.is_last),
            num_output_E=self._ints(len(request.output_ids) for request in requests),
            sampling=sampling_rows(requests, self._loaded),
        )

    def _compute(self, inputs: PrefillInputs) -> Iterator[PromptResult]:
        """Run the main model, sample first tokens, then run the drafter's prefill.

        Logits are computed only for the last tokens of prompts that end in this step. Yields one
        result for each of these prompts.
        """
        network = self._loaded.network
        segments = inputs.batch.segments
        assert segments is not None, "a prefill batch must have segments"
        drafter = self._loaded.drafter
        hidden_1TD, features_1TF = network.forward_with_taps(
            inputs.batch, self._caches, drafter.taps
        )
        logits_EV = network.logits(hidden_1TD[0, segments.ends_G[inputs.ended_E] - 1])
        no_drafts = inputs.ended_E.new_empty(len(inputs.requests), 0)
        adjusted_EV = apply_rules(
            logits_BV=logits_EV,
            rows=inputs.sampling,
            num_output_B=inputs.num_output_E,
            drafts_BN=no_drafts,
        )
        tokens_E = draw(adjusted_EV, inputs.sampling, inputs.num_output_E)
        next_GK = inputs.next_GK.clone()
        next_GK[inputs.ended_E, 0] = tokens_E
        drafter.prefill(
            batch=inputs.batch, next_GK=next_GK, features_1TF=features_1TF, caches=self._caches
        )
        logprobs = _logprobs(inputs.requests, logits_EV, tokens_E)
        features_EF: Iterable[Tensor | None] = [None] * len(inputs.requests)
        if drafter.num_features:
            features_EF = last_rows(
                x_TF=features_1TF[0],
                segments=segments,
                ended_E=inputs.ended_E,
                num=drafter.num_feature_tokens,
            )
        first_tokens_E = tokens_E.where(inputs.sampling.sampler.are_finite(adjusted_EV), NO_TOKEN)
        return zip(first_tokens_E.tolist(), logprobs, features_EF, strict=True)

    def _next_tokens(self, chunk: Chunk) -> list[int]:
        """Return the tokens after a chunk on which the chunk's cache entries may depend."""
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
            progress = ChunkResult(chunk.sequence, *end)
            self.scheduler.advance(chunk, progress.first_token)
            self._on_progress(progress)

    def _end_broken(self, sequence: PrefillSequence) -> None:
        """Fail a prompt whose logits are not finite.

        The pages that it took from the prefix cache may be the cause, and are evicted from there.
        The pages that it computed are not in the prefix cache yet.
        """
        self.scheduler.stop_computing(sequence)
        self.scheduler.evict_pages(sequence)
        self._counters["num_non_finite"] += 1
        error = NonFiniteLogits.of(sequence.identity, len(sequence.token_ids))
        log.error("%s", error)
        self._on_failed(sequence.identity, error)


def last_rows(x_TF: Tensor, segments: Segments, ended_E: Tensor, num: int) -> Tensor:
    """Gather the features of the last ``num`` tokens of each prompt that ends: [E, num * F].

    Features are in token order. If a prompt has fewer than ``num`` tokens, the missing features at
    its start are zeros. The last segment of a longer prompt always has ``num`` tokens or more.
    """
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
    """Return the log probabilities of each first token, () for requests without ``logprobs``."""
    num_logprobs = [request.sampling.logprobs for request in requests]
    max_logprobs = max((num for num in num_logprobs if num is not None), default=None)
    if max_logprobs is None:
        return [()] * len(requests)
    rows = raw_logprobs(logits_EV.unsqueeze(1), tokens_E.unsqueeze(1), max_logprobs)
    return [() if num is None else rows.of_row(i, 1, num) for i, num in enumerate(num_logprobs)]


def sampling_rows(requests: list[Request], loaded: LoadedModel) -> SamplingRows:
    """Build the sampling settings of ``requests`` as tensors with one row per request."""
    settings = [request.sampling for request in requests]
    rules = None
    if any(sampling.adjusts_logits for sampling in settings):
        rules = no_rules(len(requests), loaded.config.vocab_size, loaded.device)
        for row, request in enumerate(requests):
            stops = stop_ids(request.sampling, loaded.config.eos_token_ids)
            set_rules(
                rules=rules, row=row, request=request, output_ids=request.output_ids, stops=stops
            )
    return SamplingRows.of(
        settings=settings, device=loaded.device, rules=rules, sampler=loaded.kernels
    )
