"""A stand-in for CUDA graphs on CPUs: recorded programs with a graph's lifetime rules.

Programs of one pool share its memory. All outputs that a program of the pool returned before are
invalid once another one runs. Outputs always lie in the same memory, and inputs are copied to where
the program reads them (model/kernels/captured.py).
"""

import torch
from torch import Tensor

from tandem.core.execution import CAPTURED
from tandem.model.kernels.native import NativeKernels
from tandem.model.kernels.recorded import Recorded
from tandem.model.kernels.replayable import Function, ReplayableFunction
from tests.kernels import ours

GARBAGE = 1 << 40
"""Fill value for integers: no valid row, page or token."""


class Graph(Recorded):
    """A function whose first call runs eagerly and whose second call captures."""

    def __init__(self, function: Function, pool: list["Graph"]) -> None:
        super().__init__(function)
        self._eager, self._pool, self._has_run = function, pool, False
        self._held: list[Tensor] = []
        self._kept: tuple[Tensor, ...] = ()
        self.num_replays = 0
        pool.append(self)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self._has_run:
            outputs = self._eager(*inputs)
            self._has_run = True
            return outputs
        self._held = self._held or [one.clone() for one in inputs]
        for held, new in zip(self._held, inputs, strict=True):
            held.copy_(new)
        made = super().__call__(*self._held)
        for one in self._pool:
            one.spoil()
        self._kept = self._kept or tuple(torch.empty_like(one) for one in made)
        for kept, new in zip(self._kept, made, strict=True):
            kept.copy_(new)
        self.num_replays += 1
        return self._kept

    def spoil(self) -> None:
        for kept in self._kept:
            if kept.dtype == torch.bool:
                kept.logical_not_()
            else:
                kept.fill_(float("nan") if kept.is_floating_point() else GARBAGE)


class Graphs(NativeKernels):
    """Native kernels whose functions are replayed as graphs of one pool."""

    exec_mode, owns_outputs = CAPTURED, True

    def __init__(self) -> None:
        ours()  # loads the library
        self.pool: list[Graph] = []

    def make_replayable(self, function: Function) -> ReplayableFunction:
        return Graph(function, self.pool)
