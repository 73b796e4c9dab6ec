"""Compiled tensor programs of decode steps: row indices in, accepted tokens out."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tandem.core.draft_shapes import DraftShapes
from tandem.core.errors import EpochEnded
from tandem.decode_node.planning.states import RunningSequence
from tandem.decode_node.planning.step_plan import StepKey, StepPlan
from tandem.decode_node.program.host_drafts import HostDraftRunner, unpack_drafts
from tandem.decode_node.program.rows import Rows
from tandem.decode_node.program.step import StepShape, decode_step
from tandem.model.checkpoint.tensors import list_tensors
from tandem.model.kernels.replayable import Eager, ReplayableFunction
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import Caches
from tandem.model.network.tree import static_tree
from tandem.model.sampling.acceptance.base import VerifyOutcome
from tandem.runtime.engine_loop import is_fatal

MAX_TRIES = 2
"""Number of failures of a program's first run after which the program stays eager. Only steps with
sequences count. A single failure may have been caused by the step's rows."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Inputs of a step's program. The first rows belong to ``sequences``.

    ``num_pages`` is the width of the page tables, None for full width. ``read_B`` and ``write_B``
    are the row slots that the program reads and writes.
    """

    sequences: tuple[RunningSequence, ...]
    plan: StepPlan
    num_pages: int | None
    read_B: Tensor
    write_B: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. The device may overwrite the tensors in the next step.

    Attributes:
        outcome: Accepted tokens.
        hidden_or_logits: Hidden states or logits [B, E, ...], for ``Programs.logits``.
        is_steady_state: False if later steps of the same key will take less time.
    """

    outcome: VerifyOutcome
    hidden_or_logits: Tensor
    is_steady_state: bool


class Programs:
    """The step programs of a rank, by the number that the planner assigned (program_table.py).

    A program advances ``rows``: its inputs are the row slots to read [B] and to write [B]. The
    planner alone decides which program runs and in which mode. A drafter with ``runs_on_host`` is
    called before the program.

    ``uncapturable`` maps the keys whose programs could not be recorded or captured to the reasons.
    The loaded model keeps it for later epochs.
    """

    def __init__(
        self, loaded: LoadedModel, caches: Caches, rows: Rows, draft_shapes: DraftShapes
    ) -> None:
        self._loaded = loaded
        self._caches = caches
        self._rows = rows
        self.functions: dict[int, tuple[StepKey, ReplayableFunction]] = {}
        self.uncapturable: dict[StepKey, str] = loaded.uncapturable
        self._num_failed = Counter[StepKey]()
        self._shapes = [
            StepShape(draft_shape, static_tree(draft_shape, loaded.device))
            for draft_shape in draft_shapes
        ]
        self._host_drafts = HostDraftRunner(loaded, caches)

    @property
    def exec_mode_status(self) -> str:
        """Execution mode and degradations, as text for the rank's status."""
        form = self._loaded.exec_mode
        uncapturable = list(self.uncapturable.values())
        is_best = form == self._loaded.kernels.exec_mode
        status = [form if is_best else f"{form}: {self._loaded.dispatch.eager_reason}"]
        status += (
            [f"{len(uncapturable)} programs run eagerly: {uncapturable[-1]}"]
            if uncapturable
            else []
        )
        status += (
            [f"{lost} steps without drafts (drafting failed)"]
            if (lost := self._host_drafts.num_draftless_steps)
            else []
        )
        return ", ".join([*status, *filter(None, [self._loaded.drafter.status_note])])

    def counts(self) -> dict[str, float]:
        """Return two counters: steps whose drafter failed, and programs that stay eager."""
        lost = self._host_drafts.num_draftless_steps
        return {"num_draftless_steps": lost, "num_refused_programs": len(self.uncapturable)}

    def run(self, step: PreparedStep) -> StepResult:
        """Run the step. The first run of a program may record or capture it."""
        inputs = self._inputs(step)
        function = self._function(step)
        is_steady_state = function.is_ready and step.plan.is_final_mode
        hidden_or_logits, *outcome = self._call(
            key=step.plan.key, function=function, inputs=inputs, max_tries=MAX_TRIES
        )
        return StepResult(VerifyOutcome(*outcome), hidden_or_logits, is_steady_state)

    def capture_program(self, step: PreparedStep) -> None:
        """Capture the program of ``step``, on rows that belong to no sequence."""
        inputs = self._inputs(step)
        function = self._function(step)
        while not function.is_ready:
            self._call(key=step.plan.key, function=function, inputs=inputs, max_tries=1)

    def logits(self, result: StepResult) -> Tensor:
        """Return the raw logits [B, E, V] of a result."""
        if self._loaded.kernels.owns_outputs:
            return self._loaded.network.logits(result.hidden_or_logits)
        return result.hidden_or_logits

    def clear(self) -> None:
        """Release all programs.

        The collective group cannot be destroyed while captured graphs hold its collectives. Each
        function is cleared explicitly, because a stored exception may still reference it.
        """
        for _, function in self.functions.values():
            function.forget()
        self.functions.clear()

    def _function(self, step: PreparedStep) -> ReplayableFunction:
        key = step.plan.key
        program_id = step.plan.program_id
        if program_id in self.functions and self.functions[program_id][0] == key:
            return self.functions[program_id][1]
        compute = partial(self._compute, key, step.num_pages)
        if program_id is None:
            return Eager(compute)
        assert step.num_pages is None, "a kept program must use whole page tables"
        self.functions[program_id] = key, self._loaded.kernels.make_replayable(compute)
        return self.functions[program_id][1]

    def _call(
        self, key: StepKey, function: ReplayableFunction, inputs: tuple[Tensor, ...], max_tries: int
    ) -> tuple[Tensor, ...]:
        """Call ``function``. Its key becomes uncapturable after ``max_tries`` failed first runs."""
        try:
            return function(*inputs)
        except Exception as error:
            if not (function.is_ready or isinstance(error, EpochEnded) or is_fatal(error)):
                self._num_failed[key] += 1
                if self._num_failed[key] >= max_tries:
                    self.uncapturable[key] = (
                        f"a program could not be recorded or captured: {error!r}"
                    )
            raise

    def _inputs(self, step: PreparedStep) -> tuple[Tensor, ...]:
        key = step.plan.key
        if not self._loaded.drafter.runs_on_host:
            return step.read_B, step.write_B
        draft_shape = self._shapes[key.shape_index].draft_shape
        rows = self._rows.select(step.read_B, step.num_pages, key.traits)
        return step.read_B, step.write_B, *self._host_drafts.draft_inputs(key, draft_shape, rows)

    def _compute(
        self,
        key: StepKey,
        num_pages: int | None,
        read_B: Tensor,
        write_B: Tensor,
        *host_drafts: Tensor,
    ) -> tuple[Tensor, ...]:
        rows = self._rows.select(read_B, num_pages, key.traits)
        shape = self._shapes[key.shape_index]
        drafts = unpack_drafts(shape.draft_shape, host_drafts) if host_drafts else None
        output = decode_step(
            loaded=self._loaded,
            caches=self._caches,
            rows=rows,
            key=key,
            shape=shape,
            host_drafts=drafts,
        )
        self._rows.store(
            write_B=write_B, new=output.state, emitted=output.emitted, traits=key.traits
        )
        hidden_or_logits = (
            output.hidden_BED if self._loaded.kernels.owns_outputs else output.logits_BEV
        )
        return hidden_or_logits, *list_tensors(output.outcome)
