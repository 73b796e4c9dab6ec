"""One decode step from the host's side: put together, launched, and read once it has arrived.

Nothing here waits for the device but ``collect``, so a step may be launched before the one
before it is read.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from decode_node.buckets import Buckets
from decode_node.clock import Moment, now, wait
from decode_node.plan import SERVE, TRIAL, Report, StepKey, report_of
from decode_node.program import StepProgram, StepResult, What
from decode_node.rows import Rows
from decode_node.sequence import Sequence
from kv_transfer.pages import PagePool
from model.loaded import LoadedModel
from model.tensors import download


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a step's program needs; the first rows are those of ``sequences``. Programs are the
    same in trials."""

    sequences: tuple[Sequence, ...]
    key: StepKey
    what: What
    read_B: Tensor
    write_B: Tensor


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step; the first rows are those of ``sequences``, the others are padding. The
    tensors of its ``result`` are on the host, and complete once the device has ended."""

    sequences: tuple[Sequence, ...]
    key: StepKey
    result: StepResult
    began: Moment
    ended: Moment

    def collect(self) -> tuple[list[tuple[int, ...]], Report]:
        """Wait for the step and read it: what it gave each sequence, and what to tell of it."""
        program_s, num = wait(self.began, self.ended), len(self.sequences)
        verdict = self.result.verdict
        tokens = verdict.tokens_BN1[:num].tolist()
        accepted = verdict.num_accepted_B[:num].tolist()
        limits = [sequence.limit for sequence in self.sequences]
        rows = list(zip(limits, accepted, strict=True))
        report = report_of(self.key, program_s, rows, self.result.is_usual)
        return [tuple(row[: k + 1]) for row, k in zip(tokens, accepted, strict=True)], report


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs the tensor program of a step over the rows of a rank."""

    loaded: LoadedModel
    program: StepProgram
    rows: Rows
    pool: PagePool
    buckets: Buckets

    def prepare(self, sequences: list[Sequence], key: StepKey) -> Prepared:
        """A step of ``sequences`` and padding up to ``key.num_rows``; none of them makes it a
        dummy."""
        for sequence in sequences:
            self.rows.grow(sequence)
        if key.extras.has_rules:
            self.rows.hold_rules()
        what = replace(key, use=SERVE), self._num_pages(sequences, key)
        rows = [sequence.row for sequence in sequences]
        index = self.rows.index(rows, key.num_rows, is_trial=key.use == TRIAL)
        return Prepared(tuple(sequences), key, what, *index)

    def make(self, step: Prepared) -> None:
        """Get the program of such steps ready."""
        self.loaded.dispatch.counts = False
        self.program.make(step.what, step.read_B, step.write_B)

    def launch(self, step: Prepared) -> InFlight:
        """Start it. Rows and pages of its sequences must stay until it is collected."""
        began = now(self.loaded.device)
        self.loaded.dispatch.counts = step.key.use == SERVE
        result = download(self.program.run(step.what, step.read_B, step.write_B))
        ended = now(self.loaded.device)
        for sequence in step.sequences:
            sequence.launched(step.key.num_drafts, catches_up=step.key.width > 0)
        return InFlight(step.sequences, step.key, result, began, ended)

    def _num_pages(self, sequences: list[Sequence], key: StepKey) -> int | None:
        """The width of page tables that hold all that a row reads; whole ones where each width
        would be another program."""
        if self.loaded.kernels.reads_pages:
            return None
        bounds = (
            min(self.pool.num_pages_for(one.num_known_most + key.num_drafts), len(one.pages))
            for one in sequences
        )
        return self.buckets.pages(max(bounds, default=1))
