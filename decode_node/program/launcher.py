"""One decode step from the host's side: put together, launched, and read once it has arrived.

Nothing here waits for the device but ``collect``, so a step may be launched before the one
before it is read.
"""

from dataclasses import dataclass

from core.forms import CatchUp
from decode_node.planning.states import Running
from decode_node.planning.step_plan import SERVE, TRIAL, Report, StepKey, StepPlan, report_of
from decode_node.program.clock import Moment, now, wait
from decode_node.program.programs import Prepared, Programs
from decode_node.program.rows import Rows
from model.checkpoint.tensors import download
from model.sampling.acceptance.base import Verdict
from model.sampling.logprobs import LogprobRows, raw_logprobs
from runtime.parts import RankParts


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step; the first rows are those of ``sequences``, the others are padding. Its
    tensors are on the host, and complete once the device has ended."""

    sequences: tuple[Running, ...]
    key: StepKey
    verdict: Verdict
    logprobs: LogprobRows | None
    began: Moment
    ended: Moment
    is_usual: bool

    def collect(self) -> tuple[list[tuple[int, ...]], Report]:
        """Wait for the step and read it: what it gave each sequence, and what to tell of it."""
        program_s, num = wait(self.began, self.ended), len(self.sequences)
        tokens = self.verdict.tokens_BN1[:num].tolist()
        accepted = self.verdict.num_accepted_B[:num].tolist()
        limits = [sequence.limit for sequence in self.sequences]
        rows = list(zip(limits, accepted, strict=True))
        report = report_of(self.key, program_s, rows, self.is_usual)
        return [tuple(row[: k + 1]) for row, k in zip(tokens, accepted, strict=True)], report


class Launcher:
    """Runs the tensor programs of steps over the rows of a rank, which it owns."""

    def __init__(self, parts: RankParts, catch_up: CatchUp) -> None:
        loaded, max_drafts = parts.loaded, parts.max_drafts
        self._loaded, self._pool, self._catch_up = loaded, parts.pool, catch_up
        num_pages = parts.pool.num_pages_for(loaded.max_model_len + 2 * (max_drafts + 1))
        self.rows = Rows(loaded, parts.config.decode.max_rows, max_drafts, num_pages)
        self.programs = Programs(loaded, parts.caches, self.rows)

    def prepare(self, sequences: list[Running], plan: StepPlan) -> Prepared:
        """A step of ``sequences`` and padding up to the planned rows; none of them makes it a
        dummy."""
        key = plan.key
        for sequence in sequences:
            self.rows.grow(sequence)
        if key.extras.has_rules:
            self.rows.hold_rules()
        rows = [sequence.row for sequence in sequences]
        index = self.rows.index(rows, key.num_rows, is_trial=plan.use == TRIAL)
        return Prepared(tuple(sequences), plan, self._num_pages(sequences, key), *index)

    def make(self, step: Prepared) -> None:
        """Get the program of such steps ready."""
        self._loaded.dispatch.counts = False
        self.programs.make(step)

    def launch(self, step: Prepared) -> InFlight:
        """Start it. Rows and pages of its sequences must stay until it is collected."""
        key, began = step.plan.key, now(self._loaded.device)
        self._loaded.dispatch.counts = step.plan.use == SERVE
        result = self.programs.run(step)
        asked = [one.request.sampling.logprobs for one in step.sequences]
        most = max((num for num in asked if num is not None), default=None)
        logprobs = None
        if most is not None:
            logits_BNV, tokens_BN1 = self.programs.logits(result), result.verdict.tokens_BN1
            logprobs = download(raw_logprobs(logits_BNV, tokens_BN1, most))
        verdict = download(result.verdict)
        ended = now(self._loaded.device)
        for sequence in step.sequences:
            sequence.num_last_drafts = key.num_drafts
            sequence.behind = self._catch_up.behind(sequence.behind, key.num_drafts, key.catch_up)
        usual = self._catch_up.amount(key.num_drafts, self._catch_up.start)
        is_usual = result.is_usual and key.catch_up == usual
        return InFlight(step.sequences, key, verdict, logprobs, began, ended, is_usual)

    def _num_pages(self, sequences: list[Running], key: StepKey) -> int | None:
        """The width of page tables that hold all that a row reads; whole ones where these cost
        nothing."""
        if self._loaded.kernels.reads_pages:
            return None
        bounds = (
            min(self._pool.num_pages_for(one.num_known_most + key.num_drafts), len(one.pages))
            for one in sequences
        )
        return max(bounds, default=1)
