"""Host side of a decode step: prepare it, launch it, and read its results.

Only ``collect`` waits for the device, so a step may be launched before the previous one is read.
"""

from dataclasses import dataclass

from tandem.core.draft_shapes import num_slots_ahead
from tandem.core.execution import CatchUpPolicy
from tandem.decode_node.planning.acceptance_stats import AcceptedPath, DepthTransitions
from tandem.decode_node.planning.states import RunningSequence
from tandem.decode_node.planning.step_plan import (
    PROFILE,
    SERVE,
    StepKey,
    StepPlan,
    StepReport,
    step_report,
)
from tandem.decode_node.program.clock import DeviceTimestamp, elapsed_s, timestamp
from tandem.decode_node.program.programs import PreparedStep, Programs
from tandem.decode_node.program.rows import Rows
from tandem.model.checkpoint.tensors import download
from tandem.model.sampling.acceptance.base import RowOutput, VerifyOutcome
from tandem.model.sampling.logprobs import LogprobRows, raw_logprobs
from tandem.runtime.parts import RankParts


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step. Its first rows belong to ``sequences``, the others are padding.

    The tensors are on the host; their contents are valid once the device has completed the step.
    """

    sequences: tuple[RunningSequence, ...]
    plan: StepPlan
    transitions: DepthTransitions
    outcome: VerifyOutcome
    logprobs: LogprobRows | None
    started_at: DeviceTimestamp
    ended_at: DeviceTimestamp
    is_steady_state: bool

    def collect(self) -> tuple[list[RowOutput], StepReport]:
        """Wait for the step; return the output of each sequence, and the step's report."""
        program_s = elapsed_s(self.started_at, self.ended_at)
        runs = self.outcome.row_outputs(len(self.sequences))
        paths = self._accepted_paths([run.num_accepted for run in runs])
        return runs, step_report(
            transitions=self.transitions,
            plan=self.plan,
            program_s=program_s,
            rows=paths,
            is_steady_state=self.is_steady_state,
        )

    def _accepted_paths(self, accepted: list[int]) -> list[AcceptedPath]:
        limits = [sequence.draft_limit for sequence in self.sequences]
        path_BE = self.outcome.path_BE
        if path_BE is None:
            return [(limit, range(1, k + 1)) for limit, k in zip(limits, accepted, strict=True)]
        rows = zip(limits, path_BE.tolist(), accepted, strict=False)
        return [(limit, path[1 : k + 1]) for limit, path, k in rows]


class Launcher:
    """Launches the tensor programs of steps. Owns the row tensors of a rank."""

    def __init__(self, parts: RankParts, catch_up: CatchUpPolicy) -> None:
        loaded = parts.loaded
        self._draft_shapes = parts.draft_shapes
        self._loaded = loaded
        self._pool = parts.pool
        self._catch_up = catch_up
        self._transitions = DepthTransitions.from_shapes(self._draft_shapes)
        max_depth = self._draft_shapes[-1].depth
        width = parts.pool.num_pages_for(loaded.max_model_len + num_slots_ahead(self._draft_shapes))
        self.rows = Rows(
            loaded=loaded,
            num_rows=parts.config.decode.max_num_seqs,
            max_depth=max_depth,
            pool=parts.pool,
            width=width,
        )
        self.programs = Programs(
            loaded=loaded, caches=parts.caches, rows=self.rows, draft_shapes=self._draft_shapes
        )

    def prepare(self, sequences: list[RunningSequence], plan: StepPlan) -> PreparedStep:
        """Build a step of ``sequences``, padded to the planned number of rows.

        Without sequences the step runs on padding rows only, or on dummy rows when profiling.
        """
        key = plan.key
        for sequence in sequences:
            self.rows.update_page_table(sequence)
        if key.traits.has_logit_rules:
            self.rows.allocate_logit_rules()
        rows = [sequence.row for sequence in sequences]
        index = self.rows.row_indices(rows, key.num_rows, is_profile=plan.purpose == PROFILE)
        return PreparedStep(tuple(sequences), plan, self._num_pages(sequences, key), *index)

    def capture_program(self, step: PreparedStep) -> None:
        """Capture the program of the step's key."""
        self._loaded.dispatch.is_counting = False
        self.programs.capture_program(step)

    def launch(self, step: PreparedStep) -> InFlightStep:
        """Launch ``step``. Rows and pages of its sequences must not be freed before ``collect``."""
        key = step.plan.key
        started_at = timestamp(self._loaded.device)
        depth = self._draft_shapes[key.shape_index].depth
        self._loaded.dispatch.is_counting = step.plan.purpose == SERVE
        result = self.programs.run(step)
        num_logprobs = [sequence.request.sampling.logprobs for sequence in step.sequences]
        max_logprobs = max((num for num in num_logprobs if num is not None), default=None)
        logprobs = None
        if max_logprobs is not None:
            logits_BEV = self.programs.logits(result)
            tokens_BE = result.outcome.tokens_BE
            logprobs = download(raw_logprobs(logits_BEV, tokens_BE, max_logprobs))
        outcome = download(result.outcome)
        ended_at = timestamp(self._loaded.device)
        for sequence in step.sequences:
            sequence.last_depth = depth
            sequence.backlog = self._catch_up.backlog(sequence.backlog, depth, key.catch_up)
        usual = self._catch_up.catch_up_width(depth, self._catch_up.initial_backlog)
        is_steady_state = result.is_steady_state and key.catch_up == usual
        rest = (logprobs, started_at, ended_at)
        return InFlightStep(
            step.sequences, step.plan, self._transitions, outcome, *rest, is_steady_state
        )

    def _num_pages(self, sequences: list[RunningSequence], key: StepKey) -> int | None:
        """Return the page-table width that the longest row needs, in pages.

        Returns None (full width) if the kernels read pages in place, because wide tables then cost
        nothing.
        """
        if self._loaded.kernels.reads_paged_cache:
            return None
        more = self._draft_shapes[key.shape_index].num_slots - 1
        bounds = (
            min(self._pool.num_pages_for(sequence.max_num_known + more), len(sequence.pages))
            for sequence in sequences
        )
        return max(bounds, default=1)
