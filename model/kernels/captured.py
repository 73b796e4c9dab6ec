"""Tensor functions as CUDA graphs: captured once, then replayed with a single launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import CaptureError
from tandem.model.kernels.replayable import Function

MIN_FREE_SHARE = 0.02
"""Minimum share of device memory that must be free to capture a graph. If less is free, none is
captured, because steps need the memory."""


class Captured:
    """A function as a CUDA graph, for inputs of one shape.

    Besides its inputs, the function must read the same tensors in every call. The next call
    overwrites its outputs, in stream order.

    The first call runs eagerly, so that kernels are compiled and libraries are initialised. The
    second call captures, on a ``stream`` that nothing else may use. Graphs of one ``pool`` share
    memory, so they must never run in parallel. Other threads may use the device during a capture. A
    capture does not wait for their work: it may be a transfer whose peer waits for this host.

    Raises:
        CaptureError: The function waits for the device, memory is short, or capturing failed for
            another reason that leaves the device usable. Errors of the device itself are raised
            unchanged.
    """

    def __init__(self, function: Function, pool: Any, stream: Any) -> None:
        self._function = function
        self._pool = pool
        self._stream = stream
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
        for buffer, new in zip(self._inputs, inputs, strict=True):
            buffer.copy_(new)
        self._graph.replay()
        return self._outputs

    def forget(self) -> None:
        self._graph = None
        self._inputs = []
        self._outputs = ()

    def _capture(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        _check_free_memory()
        self._inputs = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream), _capturing(graph, self._pool):
                self._outputs = self._function(*self._inputs)
        except Exception as error:
            self.forget()
            sum(tensor.sum().item() for tensor in inputs)  # raises if the device has failed
            raise CaptureError(f"a CUDA graph cannot be captured: {error}") from error
        return graph


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture ``graph``. Unlike ``torch.cuda.graph``, this neither synchronises nor empties caches.

    Emptying the allocator's caches would make the host wait for the device too.
    """
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


def _check_free_memory() -> None:
    """Raise CaptureError if too little device memory is free.

    Empties the allocator's cache only if needed, because that makes the host wait for the device.
    """
    num_free, num_bytes = torch.cuda.mem_get_info()
    if num_free < MIN_FREE_SHARE * num_bytes:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < MIN_FREE_SHARE * num_bytes:
            raise CaptureError(
                f"less than {MIN_FREE_SHARE:.0%} of the {num_bytes / 1e9:.1f} GB on the GPU is free"
            )
