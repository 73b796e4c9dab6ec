"""One decode step from the host's side: put together, launched, and read once it has arrived.

Nothing here waits for the device but ``collect``, so a step may be launched before the one
before it is read.
"""

from dataclasses import dataclass

from tandem.core.forms import CatchUp
from tandem.core.levels import slots_ahead
from tandem.decode_node.planning.rungs import Came, Rungs
from tandem.decode_node.planning.states import Running
from tandem.decode_node.planning.step_plan import SERVE, TRIAL, Report, StepKey, StepPlan, report_of
from tandem.decode_node.program.clock import Moment, now, wait
from tandem.decode_node.program.programs import Prepared, Programs
from tandem.decode_node.program.rows import Rows
from tandem.model.checkpoint.tensors import download
from tandem.model.sampling.acceptance.base import Outcome, Run
from tandem.model.sampling.logprobs import LogprobRows, raw_logprobs
from tandem.runtime.parts import RankParts


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step; the first rows are those of ``sequences``, the others are padding. Its
    tensors are on the host, and complete once the device has ended."""

    sequences: tuple[Running, ...]
    plan: StepPlan
    rungs: Rungs
    outcome: Outcome
    logprobs: LogprobRows | None
    began: Moment
    ended: Moment
    is_usual: bool

    def collect(self) -> tuple[list[Run], Report]:
        """Wait for the step and read it: what it gave each sequence, and what to tell of it."""
        program_s = wait(self.began, self.ended)
        runs = self.outcome.runs(len(self.sequences))
        came = self._came([run.num_accepted for run in runs])
        return runs, report_of(self.rungs, self.plan, program_s, came, self.is_usual)

    def _came(self, accepted: list[int]) -> list[Came]:
        limits, path_BE = [sequence.limit for sequence in self.sequences], self.outcome.path_BE
        if path_BE is None:
            return [(limit, range(1, k + 1)) for limit, k in zip(limits, accepted, strict=True)]
        rows = zip(limits, path_BE.tolist(), accepted, strict=False)
        return [(limit, path[1 : k + 1]) for limit, path, k in rows]


class Launcher:
    """Runs the tensor programs of steps over the rows of a rank, which it owns."""

    def __init__(self, parts: RankParts, catch_up: CatchUp) -> None:
        loaded, self._levels = parts.loaded, parts.levels
        self._loaded, self._pool, self._catch_up = loaded, parts.pool, catch_up
        self._rungs, most_depth = Rungs.of(self._levels), self._levels[-1].depth
        width = parts.pool.num_pages_for(loaded.max_model_len + slots_ahead(self._levels))
        self.rows = Rows(loaded, parts.config.decode.max_num_seqs, most_depth, parts.pool, width)
        self.programs = Programs(loaded, parts.caches, self.rows, self._levels)

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
        depth = self._levels[key.level].depth
        self._loaded.dispatch.counts = step.plan.use == SERVE
        result = self.programs.run(step)
        asked = [one.request.sampling.logprobs for one in step.sequences]
        most = max((num for num in asked if num is not None), default=None)
        logprobs = None
        if most is not None:
            logits_BEV, tokens_BE = self.programs.logits(result), result.outcome.tokens_BE
            logprobs = download(raw_logprobs(logits_BEV, tokens_BE, most))
        outcome = download(result.outcome)
        ended = now(self._loaded.device)
        for sequence in step.sequences:
            sequence.last_depth = depth
            sequence.behind = self._catch_up.behind(sequence.behind, depth, key.catch_up)
        usual = self._catch_up.amount(depth, self._catch_up.start)
        is_usual, rest = result.is_usual and key.catch_up == usual, (logprobs, began, ended)
        return InFlight(step.sequences, step.plan, self._rungs, outcome, *rest, is_usual)

    def _num_pages(self, sequences: list[Running], key: StepKey) -> int | None:
        """The width of page tables that hold all that a row reads; whole ones where these cost
        nothing."""
        if self._loaded.kernels.reads_pages:
            return None
        more = self._levels[key.level].num_slots - 1
        bounds = (
            min(self._pool.num_pages_for(one.num_known_most + more), len(one.pages))
            for one in sequences
        )
        return max(bounds, default=1)
