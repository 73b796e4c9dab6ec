"""Functions of tensors whose operators are recorded once and then played without Python (tape.cpp):
on CPUs what a captured graph is to a GPU. Nothing is compiled, so a new one costs one slow run.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.model.kernels.replayable import Function


class Recorded:
    """``function``, for inputs of one shape. What it reads besides them is the same tensor in every
    call; what it returns is its caller's. Needs the library of native kernels.

    Values may not pass through the host, and no shape may depend on them: RuntimeError."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._tape: Any = None
        self._shapes: list[torch.Size] = []

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._tape is None:
            return self._record(inputs)
        assert [one.shape for one in inputs] == self._shapes, "recorded for other shapes"
        return tuple(self._tape.play(list(inputs)))

    @property
    def is_ready(self) -> bool:
        return self._tape is not None

    def forget(self) -> None:
        self._tape = None

    @property
    def operators(self) -> list[str]:
        """The names of those that a play calls, in order."""
        return [] if self._tape is None else list(self._tape.names())

    def _record(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tape = torch.classes.tandem.Tape()
        tape.begin(list(inputs))
        try:
            outputs = self._function(*inputs)
            tape.end(list(outputs))
        finally:
            tape.stop()
        self._tape, self._shapes = tape, [one.shape for one in inputs]
        return outputs
