"""One decode step from the host's side: put together, launched, and read once it has arrived.

Nothing here waits for the device but ``collect``, so a step may be launched before the one
before it is read.
"""

from dataclasses import dataclass, fields

from torch import Tensor

from decode_node.buckets import Buckets
from decode_node.clock import DeviceClock, Span
from decode_node.copies import to_device, to_host
from decode_node.rows import Rows
from decode_node.sequence import Sequence
from decode_node.step import StepShape, decode_step
from kv_transfer.pages import PagePool
from model.cache import Caches
from model.loaded import LoadedModel
from model.logprobs import LogprobRows


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step; the first rows are those of ``sequences``, the others are padding. Its
    tensors are on the host, and complete once ``span`` has ended."""

    sequences: tuple[Sequence, ...]
    num_drafts: int
    tokens_BN1: Tensor
    num_accepted_B: Tensor
    logprobs: LogprobRows | None
    span: Span


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave each of its sequences, in their order; ``program_s`` is how long the tensor
    program ran."""

    runs: tuple[tuple[int, ...], ...]
    logprobs: LogprobRows | None
    program_s: float


class Launcher:
    """Runs the tensor program of a step over the rows of a rank."""

    def __init__(
        self, loaded: LoadedModel, caches: Caches, rows: Rows, pool: PagePool, buckets: Buckets
    ) -> None:
        self._loaded = loaded
        self._caches = caches
        self._rows = rows
        self._pool = pool
        self._buckets = buckets
        self._clock = DeviceClock(loaded.device)

    def launch(self, sequences: list[Sequence], num_drafts: int) -> InFlight:
        """Start a step of ``sequences``; their rows and pages must stay until it is collected."""
        for sequence in sequences:
            self._rows.grow(sequence.row, sequence.pages)
        num_rows = self._buckets.rows(len(sequences))
        max_pages = self._max_pages(sequences, num_drafts, num_rows)
        index = self._index(sequences, num_rows)
        shape = _shape(sequences, num_drafts)
        began = self._clock.now()
        rows = self._rows.select(index, self._buckets.pages(max(max_pages)))
        output = decode_step(
            self._loaded.network,
            self._loaded.drafter,
            self._caches,
            rows,
            shape,
            self._rows.rules(index) if shape.has_rules else None,
            max_pages,
            self._loaded.think_ids,
        )
        self._rows.store(index, output.rows)
        tokens_BN1 = to_host(output.verdict.tokens_BN1)
        num_accepted_B = to_host(output.verdict.num_accepted_B)
        logprobs = _on_host(output.logprobs)
        span = self._clock.since(began)
        for sequence in sequences:
            sequence.num_last_drafts = num_drafts
        return InFlight(tuple(sequences), num_drafts, tokens_BN1, num_accepted_B, logprobs, span)

    def collect(self, step: InFlight) -> StepResult:
        """Wait for ``step`` and read it."""
        program_s = step.span.wait()
        num = len(step.sequences)
        tokens = step.tokens_BN1[:num].tolist()
        accepted = step.num_accepted_B[:num].tolist()
        runs = tuple(tuple(row[: k + 1]) for row, k in zip(tokens, accepted, strict=True))
        return StepResult(runs, step.logprobs, program_s)

    def _index(self, sequences: list[Sequence], num_rows: int) -> Tensor:
        slots = [sequence.row for sequence in sequences]
        slots += [self._rows.padding_row] * (num_rows - len(slots))
        return to_device(slots, self._loaded.device)

    def _max_pages(
        self, sequences: list[Sequence], num_drafts: int, num_rows: int
    ) -> tuple[int, ...]:
        num_pages_for = self._pool.num_pages_for
        bounds = [
            min(num_pages_for(sequence.num_known_most + num_drafts), len(sequence.pages))
            for sequence in sequences
        ]
        return (*bounds, *(1,) * (num_rows - len(bounds)))


def _shape(sequences: list[Sequence], num_drafts: int) -> StepShape:
    settings = [sequence.request.sampling for sequence in sequences]
    asked = [one.logprobs for one in settings if one.logprobs is not None]
    return StepShape(
        num_drafts=num_drafts,
        num_emitted_most=1 + max(sequence.num_last_drafts for sequence in sequences),
        all_greedy=all(one.temperature == 0 for one in settings),
        has_rules=any(one.adjusts_logits for one in settings),
        num_logprobs=max(asked, default=None),
        kinds=tuple(sorted({sequence.request.speculation.acceptance for sequence in sequences})),
    )


def _on_host(logprobs: LogprobRows | None) -> LogprobRows | None:
    if logprobs is None:
        return None
    return LogprobRows(*(to_host(getattr(logprobs, field.name)) for field in fields(logprobs)))
