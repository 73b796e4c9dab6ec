"""Tensor functions whose operators are recorded once and replayed without Python (cpu/tape.cpp).

They are the CPU counterpart of CUDA graphs. Nothing is compiled, so recording costs one slow call.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.model.kernels.replayable import Function


class Recorded:
    """A recorded function, for inputs of one shape. Needs the library of the native kernels.

    Besides its inputs, the function must read the same tensors in every call. The caller owns the
    outputs. Raises RuntimeError if the function moves values through the host or if a shape depends
    on values.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._tape: Any = None
        self._shapes: list[torch.Size] = []

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._tape is None:
            return self._record(inputs)
        assert [tensor.shape for tensor in inputs] == self._shapes, (
            "the program was recorded for other input shapes"
        )
        return tuple(self._tape.play(list(inputs)))

    @property
    def is_ready(self) -> bool:
        return self._tape is not None

    def forget(self) -> None:
        self._tape = None

    @property
    def operators(self) -> list[str]:
        """Names of the operators that a replay calls, in order."""
        return [] if self._tape is None else list(self._tape.names())

    def _record(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tape = torch.classes.tandem.Tape()
        tape.begin(list(inputs))
        try:
            outputs = self._function(*inputs)
            tape.end(list(outputs))
        finally:
            tape.stop()
        self._tape = tape
        self._shapes = [tensor.shape for tensor in inputs]
        return outputs
