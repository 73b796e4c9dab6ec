"""The prefill engine of one rank: prompt to cache pages, first token and last hidden state.

Runs on the engine thread. Shape legend: T tokens of a step, G chunks of it, E of these that end
their prompt, D hidden.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from core.identity import Identity
from core.request import Request, TokenLogprobs
from core.stopping import stop_ids
from kv_transfer.pages import PagePool
from model.adjust import no_rules, set_rules
from model.batch import Batch, Segment, pack
from model.cache import Caches
from model.drafters.base import UNKNOWN
from model.loaded import LoadedModel
from model.logprobs import raw_logprobs
from model.sampling import SamplingRows, choose
from prefill_node.page_source import PageSource, PooledPages
from prefill_node.planner import LocalPlanner, Proposal, StepKey
from prefill_node.scheduler import Chunk, Scheduler
from prefill_node.sequence import Sequence
from runtime.lockstep import Planner


@dataclass(frozen=True, slots=True)
class Progress:
    """After a chunk: ``num_tokens`` slots are computed, per cache group.

    With the last one ``first_token`` is sampled (``logprobs`` are its own, if asked for) and
    ``hidden_D`` is the main model's hidden state of the last token. ``started_at`` is the
    monotonic time the first chunk began at.
    """

    identity: Identity
    pages: tuple[int, ...]
    num_tokens: tuple[int, ...]
    num_cached: int
    started_at: float
    first_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    hidden_D: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step needs, all made before it is launched.

    ``next_G`` are the tokens behind the chunks, UNKNOWN where the prompt ends; ``ended_E`` are the
    chunks with which one does, ``requests`` theirs.
    """

    batch: Batch
    next_G: Tensor
    ended_E: Tensor
    last_rows_E: Tensor
    num_output_E: Tensor
    sampling: SamplingRows
    requests: list[Request]


class PrefillEngine:
    """``on_progress`` is told of every computed chunk, on the engine thread. Prompts get pages from
    ``pages``, by default from the pool. ``planner`` is asked in every step; None is one of its own,
    of a gang of one rank."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: PagePool,
        caches: Caches,
        *,
        epoch: int,
        max_batch_tokens: int,
        on_progress: Callable[[Progress], None],
        pages: PageSource | None = None,
        planner: Planner[Proposal, StepKey] | None = None,
    ) -> None:
        self._loaded = loaded
        self._caches = caches
        self._page_size = pool.page_size
        self._on_progress = on_progress
        self.scheduler = Scheduler(pages or PooledPages(pool), max_batch_tokens)
        self._planner = planner or LocalPlanner(epoch)
        self.num_steps = 0

    def submit(self, identity: Identity, request: Request) -> Sequence:
        """Queue a prompt; see Scheduler.admit for what it raises."""
        return self.scheduler.admit(identity, request)

    def drop(self, identity: Identity) -> None:
        self.scheduler.drop(identity)

    def has_work(self) -> bool:
        return self.scheduler.num_waiting > 0

    @torch.inference_mode()
    def step(self) -> None:
        """Propose → plan → launch: the next chunks in one forward of the planned size."""
        chunks = self.scheduler.next_chunks()
        proposal = Proposal(sum(chunk.num_tokens for chunk in chunks))
        plan = self._planner.plan(proposal)
        if plan.key is not None:
            self._compute(chunks, plan.key)
        self.num_steps += 1

    def _compute(self, chunks: list[Chunk], key: StepKey) -> None:
        """Main model, first tokens, drafter; without a chunk a dummy that leaves no trace. Logits
        are those of the last tokens of prompts that end here, taken once."""
        _note_start(chunks)
        inputs, network = self._inputs(chunks, key), self._loaded.network
        hidden_1TD = network(inputs.batch, self._caches)
        hidden_ED = hidden_1TD[0, inputs.last_rows_E]
        logits_EV = network.logits(hidden_ED)
        no_drafts = inputs.ended_E.new_empty(len(inputs.requests), 0)
        tokens_E = choose(logits_EV, inputs.sampling, inputs.num_output_E, no_drafts)
        next_G = inputs.next_G.index_copy(0, inputs.ended_E, tokens_E)
        self._loaded.drafter.prefill(inputs.batch, next_G, hidden_1TD, self._caches)
        logprobs = _logprobs(inputs.requests, logits_EV, tokens_E)
        self._report(chunks, tokens_E.tolist(), hidden_ED, logprobs)

    def _inputs(self, chunks: list[Chunk], key: StepKey) -> Inputs:
        ended = [chunk for chunk in chunks if chunk.is_last]
        requests = [chunk.sequence.request for chunk in ended]
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))

        def ints(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=self._loaded.device)

        segments, device = [_segment(chunk) for chunk in chunks], self._loaded.device
        return Inputs(
            batch=pack(segments, self._page_size, device, key.num_tokens),
            next_G=ints(UNKNOWN if c.is_last else c.sequence.token_ids[c.hi] for c in chunks),
            ended_E=ints(i for i, chunk in enumerate(chunks) if chunk.is_last),
            last_rows_E=ints(end - 1 for c, end in zip(chunks, ends, strict=True) if c.is_last),
            num_output_E=ints(len(request.output_ids) for request in requests),
            sampling=sampling_rows(requests, self._loaded),
            requests=requests,
        )

    def _report(
        self,
        chunks: list[Chunk],
        tokens: list[int],
        hidden_ED: Tensor,
        logprobs: list[tuple[TokenLogprobs, ...]],
    ) -> None:
        row = 0
        for chunk in chunks:
            progress = self._progress(chunk)
            if chunk.is_last:
                progress = replace(
                    progress,
                    first_token=tokens[row],
                    logprobs=logprobs[row],
                    hidden_D=hidden_ED[row],
                )
                row += 1
            self.scheduler.advance(chunk, progress.first_token)
            self._on_progress(progress)

    def _progress(self, chunk: Chunk) -> Progress:
        sequence = chunk.sequence
        return Progress(
            identity=sequence.identity,
            pages=tuple(sequence.pages),
            num_tokens=(chunk.hi,) * len(self._caches),
            num_cached=sequence.num_cached,
            started_at=sequence.started_at,
        )


def _segment(chunk: Chunk) -> Segment:
    sequence = chunk.sequence
    return Segment(sequence.token_ids[chunk.lo : chunk.hi], chunk.lo, sequence.pages)


def _note_start(chunks: list[Chunk]) -> None:
    for chunk in chunks:
        if chunk.lo == chunk.sequence.num_cached:
            chunk.sequence.started_at = time.monotonic()


def _logprobs(
    requests: list[Request], logits_EV: Tensor, tokens_E: Tensor
) -> list[tuple[TokenLogprobs, ...]]:
    """Of each first token, () for requests that did not ask."""
    asked = [request.sampling.logprobs for request in requests]
    most = max((num for num in asked if num is not None), default=None)
    if most is None:
        return [()] * len(requests)
    rows = raw_logprobs(logits_EV.unsqueeze(1), tokens_E.unsqueeze(1), most)
    return [() if num is None else rows.of_row(i, 1, num) for i, num in enumerate(asked)]


def sampling_rows(requests: list[Request], loaded: LoadedModel) -> SamplingRows:
    """The requests' settings, one row each."""
    settings = [request.sampling for request in requests]
    if not any(one.adjusts_logits for one in settings):
        return SamplingRows.of(settings, loaded.device)
    rules = no_rules(len(requests), loaded.config.vocab_size, loaded.device)
    for row, request in enumerate(requests):
        stops = stop_ids(request.sampling, loaded.config.eos_token_ids)
        set_rules(rules, row, request, request.output_ids, stops)
    return SamplingRows.of(settings, loaded.device, rules)
