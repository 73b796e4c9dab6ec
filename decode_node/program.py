"""The tensor program of a step: which rows to read and to write in, verdicts out (design.md)."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from decode_node.plan import StepKey, keep
from decode_node.rows import Rows
from decode_node.step import decode_step
from model.acceptance.base import Verdict
from model.cache import Caches
from model.kernels.repeated import Eager, Repeated
from model.loaded import LoadedModel
from model.logprobs import LogprobRows

What = tuple[StepKey, int | None]
"""All that decides on a program's way: besides its key the width of page tables."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What verification found; the next step may overwrite it, in the order of the device. Others
    of a step's kind will take less time if it was not ``is_usual``."""

    verdict: Verdict
    logprobs: LogprobRows | None
    is_usual: bool


class StepProgram:
    """Functions of the rows to read [B] and those to write [B] of ``rows``, which they advance; in
    the form that this rank can have. Which ones are kept follows from the keys it was asked for,
    so it is the same on every rank."""

    def __init__(self, loaded: LoadedModel, caches: Caches, rows: Rows) -> None:
        self._loaded, self._caches, self._rows = loaded, caches, rows
        self.kept: OrderedDict[What, Repeated] = OrderedDict()

    def run(self, what: What, read_B: Tensor, write_B: Tensor) -> StepResult:
        """A program that fails while it is made is made anew when it is asked for again. Those that
        are made ahead, and this one was not, are run eagerly."""
        makes_ahead = self._loaded.kernels.makes_ahead
        function = self.kept.get(what) or self._new(what, not makes_ahead)
        may_be_made = makes_ahead and not self._loaded.is_eager
        is_usual = function.is_ready and not (may_be_made and isinstance(function, Eager))
        tokens_BN1, num_accepted_B, *logprobs = function(read_B, write_B)
        self._keep(what, function)
        verdict = Verdict(tokens_BN1, num_accepted_B)
        return StepResult(verdict, LogprobRows(*logprobs) if logprobs else None, is_usual)

    def make(self, what: What, read_B: Tensor, write_B: Tensor) -> None:
        """Get a program ready, on rows that are nobody's. After one that cannot be had no more are
        made here."""
        function = self._new(what)
        try:
            while not function.is_ready:
                function(read_B, write_B)
        except Exception as error:
            self._loaded.kernels.why_eager = f"a program could not be made: {error!r}"
            raise
        self._keep(what, function)

    def clear(self) -> None:
        """A group of ranks cannot end before the graphs that hold its collectives have; an error
        that is kept may still hold the functions."""
        for function in self.kept.values():
            function.forget()
        self.kept.clear()

    def _keep(self, what: What, function: Repeated) -> None:
        if not isinstance(function, Eager):
            keep(self.kept, what, function)

    def _new(self, what: What, is_repeated: bool = True) -> Repeated:
        def function(read_B: Tensor, write_B: Tensor) -> tuple[Tensor, ...]:
            return self._compute(what, read_B, write_B)

        if self._loaded.is_eager or not is_repeated:
            return Eager(function)
        return self._loaded.kernels.repeated(function)

    def _compute(self, what: What, read_B: Tensor, write_B: Tensor) -> tuple[Tensor, ...]:
        (key, num_pages), loaded = what, self._loaded
        output = decode_step(
            loaded.network,
            loaded.drafter,
            self._caches,
            self._rows.select(read_B, num_pages, key.extras),
            key,
            loaded.think_ids,
        )
        self._rows.store(write_B, output.state, output.verdict, key.extras)
        logprobs = () if output.logprobs is None else output.logprobs.tensors
        return output.verdict.tokens_BN1, output.verdict.num_accepted_B, *logprobs
