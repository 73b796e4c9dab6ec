"""The tensor programs of steps: which rows to read and to write in, verdicts out (design.md)."""

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
from tandem.model.sampling.acceptance.base import Outcome
from tandem.runtime.engine_loop import is_fatal

MAX_TRIES = 2
"""To make a program in a step of somebody's rows, whose fault it may have been."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """All that a step's program needs; the first rows are those of ``sequences``. ``num_pages`` is
    the width of page tables, None for whole ones."""

    sequences: tuple[RunningSequence, ...]
    plan: StepPlan
    num_pages: int | None
    read_B: Tensor
    write_B: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What verification found, and its ``places`` [B, E, ..] (Programs.logits); the next step may
    overwrite it, in the order of the device. Others of a step's kind will take less time if it was
    not ``is_steady_state``."""

    outcome: Outcome
    hidden_or_logits: Tensor
    is_steady_state: bool


class Programs:
    """Functions of the rows to read [B] and those to write [B] of ``rows``, which they advance, by
    the number that the planner gave each (planning/forms.py); this rank decides nothing. A drafter
    that is fed is called before them.

    Those that could not be made, and why, the loaded model keeps for later lives.
    """

    def __init__(
        self, loaded: LoadedModel, caches: Caches, rows: Rows, levels: DraftShapes
    ) -> None:
        self._loaded, self._caches, self._rows = loaded, caches, rows
        self.functions: dict[int, tuple[StepKey, ReplayableFunction]] = {}
        self.uncapturable: dict[StepKey, str] = loaded.uncapturable
        self._num_failed = Counter[StepKey]()
        self._shapes = [StepShape(level, static_tree(level, loaded.device)) for level in levels]
        self._host_drafts = HostDraftRunner(loaded, caches)

    @property
    def exec_mode_status(self) -> str:
        """In which they are had, and what is not as it could be; for a status."""
        form, uncapturable = self._loaded.exec_mode, list(self.uncapturable.values())
        is_best = form == self._loaded.kernels.exec_mode
        status = [form if is_best else f"{form}: {self._loaded.dispatch.eager_reason}"]
        status += (
            [f"{len(uncapturable)} programs eager: {uncapturable[-1]}"] if uncapturable else []
        )
        status += (
            [f"{lost} steps without drafts"]
            if (lost := self._host_drafts.num_draftless_steps)
            else []
        )
        return ", ".join([*status, *filter(None, [self._loaded.drafter.status_note])])

    def counts(self) -> dict[str, float]:
        """Return the steps whose drafter failed, and the programs that could not be made."""
        lost = self._host_drafts.num_draftless_steps
        return {"num_draftless_steps": lost, "num_refused_programs": len(self.uncapturable)}

    def run(self, step: PreparedStep) -> StepResult:
        """The step, which may make its program."""
        inputs, function = self._inputs(step), self._function(step)
        is_steady_state = function.is_ready and step.plan.is_final_mode
        hidden_or_logits, *outcome = self._call(step.plan.key, function, inputs, MAX_TRIES)
        return StepResult(Outcome(*outcome), hidden_or_logits, is_steady_state)

    def capture_program(self, step: PreparedStep) -> None:
        """Get a program ready, on rows that are nobody's."""
        inputs, function = self._inputs(step), self._function(step)
        while not function.is_ready:
            self._call(step.plan.key, function, inputs, 1)

    def logits(self, result: StepResult) -> Tensor:
        """Raw logits [B, E, V] of its places."""
        if self._loaded.kernels.owns_outputs:
            return self._loaded.network.logits(result.hidden_or_logits)
        return result.hidden_or_logits

    def clear(self) -> None:
        """A group of ranks cannot end before the graphs that hold its collectives have; an error
        that is kept may still hold the functions."""
        for _, function in self.functions.values():
            function.forget()
        self.functions.clear()

    def _function(self, step: PreparedStep) -> ReplayableFunction:
        key, program_id = step.plan.key, step.plan.program_id
        if program_id in self.functions and self.functions[program_id][0] == key:
            return self.functions[program_id][1]
        compute = partial(self._compute, key, step.num_pages)
        if program_id is None:
            return Eager(compute)
        assert step.num_pages is None, "page tables of kept programs are whole"
        self.functions[program_id] = key, self._loaded.kernels.make_replayable(compute)
        return self.functions[program_id][1]

    def _call(
        self, key: StepKey, function: ReplayableFunction, inputs: tuple[Tensor, ...], max_tries: int
    ) -> tuple[Tensor, ...]:
        """After ``max_tries`` that could not make the program it is refused."""
        try:
            return function(*inputs)
        except Exception as error:
            if not (function.is_ready or isinstance(error, EpochEnded) or is_fatal(error)):
                self._num_failed[key] += 1
                if self._num_failed[key] >= max_tries:
                    self.uncapturable[key] = f"a program could not be made: {error!r}"
            raise

    def _inputs(self, step: PreparedStep) -> tuple[Tensor, ...]:
        key = step.plan.key
        if not self._loaded.drafter.runs_on_host:
            return step.read_B, step.write_B
        level = self._shapes[key.shape_index].draft_shape
        rows = self._rows.select(step.read_B, step.num_pages, key.traits)
        return step.read_B, step.write_B, *self._host_drafts.draft_inputs(key, level, rows)

    def _compute(
        self,
        key: StepKey,
        num_pages: int | None,
        read_B: Tensor,
        write_B: Tensor,
        *host_drafts: Tensor,
    ) -> tuple[Tensor, ...]:
        rows, shape = (
            self._rows.select(read_B, num_pages, key.traits),
            self._shapes[key.shape_index],
        )
        drafts = unpack_drafts(shape.draft_shape, host_drafts) if host_drafts else None
        output = decode_step(self._loaded, self._caches, rows, key, shape, drafts)
        self._rows.store(write_B, output.state, output.emitted, key.traits)
        hidden_or_logits = (
            output.hidden_BED if self._loaded.kernels.owns_outputs else output.logits_BEV
        )
        return hidden_or_logits, *list_tensors(output.outcome)
