"""One decode step from the host's side: put together, launched, and read once it has arrived.

Nothing here waits for the device but ``collect``, so a step may be launched before the one
before it is read.
"""

from dataclasses import dataclass

from torch import Tensor

from decode_node.buckets import Buckets
from decode_node.clock import Moment, now, wait
from decode_node.plan import PLAIN, Extras, Report, StepKey, extras_of, report_of
from decode_node.rows import Rows, RowTensors
from decode_node.sequence import Sequence
from decode_node.step import decode_step
from kv_transfer.pages import PagePool
from model.acceptance.base import Verdict
from model.cache import Caches
from model.loaded import LoadedModel
from model.logprobs import LogprobRows
from model.tensors import download


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a step's program needs; the first rows are those of ``sequences``."""

    sequences: tuple[Sequence, ...]
    key: StepKey
    rows: RowTensors
    write_B: Tensor
    extras: Extras


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step; the first rows are those of ``sequences``, the others are padding. Its
    tensors are on the host, and complete once the device has ended."""

    sequences: tuple[Sequence, ...]
    key: StepKey
    verdict: Verdict
    logprobs: LogprobRows | None
    began: Moment
    ended: Moment

    def collect(self) -> tuple[list[tuple[int, ...]], Report]:
        """Wait for the step and read it: what it gave each sequence, and what to tell of it."""
        program_s, num = wait(self.began, self.ended), len(self.sequences)
        tokens = self.verdict.tokens_BN1[:num].tolist()
        accepted = self.verdict.num_accepted_B[:num].tolist()
        limits = [sequence.limit for sequence in self.sequences]
        report = report_of(self.key, program_s, list(zip(limits, accepted, strict=True)))
        return [tuple(row[: k + 1]) for row, k in zip(tokens, accepted, strict=True)], report


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs the tensor program of a step over the rows of a rank."""

    loaded: LoadedModel
    caches: Caches
    rows: Rows
    pool: PagePool
    buckets: Buckets

    def prepare(self, sequences: list[Sequence], key: StepKey) -> Prepared:
        """A step of ``sequences`` and padding up to ``key.num_rows``; none of them makes it a
        dummy."""
        for sequence in sequences:
            self.rows.grow(sequence)
        extras = PLAIN if key.plain else extras_of(sequences)
        read_B, write_B = self.rows.index([s.row for s in sequences], key.num_rows)
        if key.trial:
            rows = self.rows.made_up(key.num_rows)
        else:
            rows = self.rows.select(read_B, self._num_pages(sequences, key), extras)
        return Prepared(tuple(sequences), key, rows, write_B, extras)

    def launch(self, step: Prepared) -> InFlight:
        """Start it. Rows and pages of its sequences must stay until it is collected."""
        began, extras = now(self.loaded.device), step.extras
        self.loaded.dispatch.counts = not step.key.trial
        output = decode_step(
            self.loaded.network,
            self.loaded.drafter,
            self.caches,
            step.rows,
            step.key,
            extras,
            self.loaded.think_ids,
        )
        self.rows.store(step.write_B, output.state, extras)
        verdict, logprobs = download(output.verdict), download(output.logprobs)
        ended = now(self.loaded.device)
        for sequence in step.sequences:
            sequence.num_last_drafts = step.key.num_drafts
        return InFlight(step.sequences, step.key, verdict, logprobs, began, ended)

    def _num_pages(self, sequences: list[Sequence], key: StepKey) -> int:
        """The width of a page table that holds all that a row reads."""
        bounds = (
            min(self.pool.num_pages_for(one.num_known_most + key.num_drafts), len(one.pages))
            for one in sequences
        )
        return self.buckets.pages(max(bounds, default=1))
