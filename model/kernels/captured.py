"""Functions of tensors as CUDA graphs: what is launched once is launched again as a whole."""

from typing import Any

import torch
from torch import Tensor

from core.errors import CannotCapture
from model.kernels.repeated import Function


class Captured:
    """``function``, for inputs of one shape. What it reads besides them is the same tensor in every
    call; what it returns is overwritten by the next, in the order of the device.

    The first call is an eager one, in which kernels are compiled and libraries take what they
    need; the second captures. Graphs of one ``pool`` share memory, and never run side by side.
    Other threads may use the device meanwhile. CannotCapture if the host waits for the device, or
    for any other reason that leaves the device well; else what is wrong with it.
    """

    def __init__(self, function: Function, pool: Any) -> None:
        self._function, self._pool = function, pool
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self._has_run:
            outputs = self._function(*inputs)
            self._has_run = True
            return outputs
        if self._graph is None:
            self._graph = self._captured(inputs)
        for held, new in zip(self._inputs, inputs, strict=True):
            held.copy_(new)
        self._graph.replay()
        return self._outputs

    def forget(self) -> None:
        self._graph, self._inputs, self._outputs = None, [], ()

    def _captured(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        self._inputs = [one.clone() for one in inputs]
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            # A capture that fails as it ends does not go back to the stream before it.
            with torch.cuda.stream(torch.cuda.current_stream()), capture:
                self._outputs = self._function(*self._inputs)
        except Exception as error:
            self.forget()
            sum(one.sum().item() for one in inputs)  # raises if the device answers no more
            raise CannotCapture(f"it cannot be captured: {error}") from error
        return graph
