"""Functions of tensors as CUDA graphs: what is launched once is launched again as a whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import CaptureError
from tandem.model.kernels.replayable import Function

MIN_FREE_SHARE = 0.02
"""Of the device's memory, or no program is made: steps have to run, too."""


class Captured:
    """``function``, for inputs of one shape. What it reads besides them is the same tensor in every
    call; what it returns is overwritten by the next, in the order of the device.

    The first call is an eager one, in which kernels are compiled and libraries take what they
    need; the second captures, on a ``stream`` that nothing else uses. Graphs of one ``pool`` share
    memory, and never run side by side. Other threads may use the device meanwhile, and nothing
    waits for what it is busy with: it may be a transfer whose other end waits for this host.
    CaptureError if the host waits for the device, memory is short, or for any other reason that
    leaves the device well; else what is wrong with it.
    """

    def __init__(self, function: Function, pool: Any, stream: Any) -> None:
        self._function, self._pool, self._stream = function, pool, stream
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
            self._graph = self._capture(inputs)
        for held, new in zip(self._inputs, inputs, strict=True):
            held.copy_(new)
        self._graph.replay()
        return self._outputs

    def forget(self) -> None:
        self._graph, self._inputs, self._outputs = None, [], ()

    def _capture(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        _check_free_memory()
        self._inputs, graph = [one.clone() for one in inputs], torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream), _capturing(graph, self._pool):
                self._outputs = self._function(*self._inputs)
        except Exception as error:
            self.forget()
            sum(one.sum().item() for one in inputs)  # raises if the device answers no more
            raise CaptureError(f"it cannot be captured: {error}") from error
        return graph


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """torch.cuda.graph waits for the whole device first, and so do the caches that it empties."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


def _check_free_memory() -> None:
    """What is only kept for later is given up first, which makes the device wait."""
    num_free, num_bytes = torch.cuda.mem_get_info()
    if num_free < MIN_FREE_SHARE * num_bytes:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < MIN_FREE_SHARE * num_bytes:
            raise CaptureError(
                f"less than {MIN_FREE_SHARE:.0%} of {num_bytes / 1e9:.1f} GB is free"
            )
