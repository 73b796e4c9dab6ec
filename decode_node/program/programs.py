"""The tensor programs of steps: which rows to read and to write in, verdicts out (design.md)."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tandem.core.errors import EpochEnded
from tandem.core.levels import Levels
from tandem.decode_node.planning.states import Running
from tandem.decode_node.planning.step_plan import StepKey, StepPlan
from tandem.decode_node.program.feeder import Feeder, unpacked
from tandem.decode_node.program.rows import Rows
from tandem.decode_node.program.step import Shape, decode_step
from tandem.model.checkpoint.tensors import tensors
from tandem.model.kernels.repeated import Eager, Repeated
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import Caches
from tandem.model.network.tree import static_tree
from tandem.model.sampling.acceptance.base import Outcome
from tandem.runtime.engine_loop import is_fatal

MOST_TRIES = 2
"""To make a program in a step of somebody's rows, whose fault it may have been."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a step's program needs; the first rows are those of ``sequences``. ``num_pages`` is
    the width of page tables, None for whole ones."""

    sequences: tuple[Running, ...]
    plan: StepPlan
    num_pages: int | None
    read_B: Tensor
    write_B: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What verification found, and its ``places`` [B, E, ..] (Programs.logits); the next step may
    overwrite it, in the order of the device. Others of a step's kind will take less time if it was
    not ``is_usual``."""

    outcome: Outcome
    places: Tensor
    is_usual: bool


class Programs:
    """Functions of the rows to read [B] and those to write [B] of ``rows``, which they advance, by
    the number that the planner gave each (planning/forms.py); this rank decides nothing. A drafter
    that is fed is called before them.

    Those that could not be made, and why, the loaded model keeps for later lives.
    """

    def __init__(self, loaded: LoadedModel, caches: Caches, rows: Rows, levels: Levels) -> None:
        self._loaded, self._caches, self._rows = loaded, caches, rows
        self.kept: dict[int, tuple[StepKey, Repeated]] = {}
        self.refused: dict[StepKey, str] = loaded.refused
        self._num_failed = Counter[StepKey]()
        self._shapes = [Shape(level, static_tree(level, loaded.device)) for level in levels]
        self._feeder = Feeder(loaded, caches)

    @property
    def form(self) -> str:
        """In which they are had, and what is not as it could be; for a status."""
        form, refused = self._loaded.form, list(self.refused.values())
        is_best = form == self._loaded.kernels.form
        told = [form if is_best else f"{form}: {self._loaded.dispatch.why_eager}"]
        told += [f"{len(refused)} programs eager: {refused[-1]}"] if refused else []
        told += [f"{lost} steps without drafts"] if (lost := self._feeder.num_lost) else []
        return ", ".join([*told, *filter(None, [self._loaded.drafter.trouble])])

    def counts(self) -> dict[str, float]:
        """Return the steps whose drafter failed, and the programs that could not be made."""
        lost = self._feeder.num_lost
        return {"num_draftless_steps": lost, "num_refused_programs": len(self.refused)}

    def run(self, step: Prepared) -> StepResult:
        """The step, which may make its program."""
        inputs, function = self._inputs(step), self._function(step)
        is_usual = function.is_ready and step.plan.is_settled
        places, *outcome = self._call(step.plan.key, function, inputs, MOST_TRIES)
        return StepResult(Outcome(*outcome), places, is_usual)

    def make(self, step: Prepared) -> None:
        """Get a program ready, on rows that are nobody's."""
        inputs, function = self._inputs(step), self._function(step)
        while not function.is_ready:
            self._call(step.plan.key, function, inputs, 1)

    def logits(self, result: StepResult) -> Tensor:
        """Raw logits [B, E, V] of its places."""
        if self._loaded.kernels.keeps_outputs:
            return self._loaded.network.logits(result.places)
        return result.places

    def clear(self) -> None:
        """A group of ranks cannot end before the graphs that hold its collectives have; an error
        that is kept may still hold the functions."""
        for _, function in self.kept.values():
            function.forget()
        self.kept.clear()

    def _function(self, step: Prepared) -> Repeated:
        key, number = step.plan.key, step.plan.number
        if number in self.kept and self.kept[number][0] == key:
            return self.kept[number][1]
        compute = partial(self._compute, key, step.num_pages)
        if number is None:
            return Eager(compute)
        assert step.num_pages is None, "page tables of kept programs are whole"
        self.kept[number] = key, self._loaded.kernels.repeated(compute)
        return self.kept[number][1]

    def _call(
        self, key: StepKey, function: Repeated, inputs: tuple[Tensor, ...], most_tries: int
    ) -> tuple[Tensor, ...]:
        """After ``most_tries`` that could not make the program it is refused."""
        try:
            return function(*inputs)
        except Exception as error:
            if not (function.is_ready or isinstance(error, EpochEnded) or is_fatal(error)):
                self._num_failed[key] += 1
                if self._num_failed[key] >= most_tries:
                    self.refused[key] = f"a program could not be made: {error!r}"
            raise

    def _inputs(self, step: Prepared) -> tuple[Tensor, ...]:
        key = step.plan.key
        if not self._loaded.drafter.is_fed:
            return step.read_B, step.write_B
        level = self._shapes[key.level].level
        rows = self._rows.select(step.read_B, step.num_pages, key.extras)
        return step.read_B, step.write_B, *self._feeder.feed(key, level, rows)

    def _compute(
        self, key: StepKey, num_pages: int | None, read_B: Tensor, write_B: Tensor, *fed: Tensor
    ) -> tuple[Tensor, ...]:
        rows, shape = self._rows.select(read_B, num_pages, key.extras), self._shapes[key.level]
        drafts = unpacked(shape.level, fed) if fed else None
        output = decode_step(self._loaded, self._caches, rows, key, shape, drafts)
        self._rows.store(write_B, output.state, output.emitted, key.extras)
        places = output.hidden_BED if self._loaded.kernels.keeps_outputs else output.logits_BEV
        return places, *tensors(output.outcome)
