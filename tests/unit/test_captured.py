"""A program that cannot be captured is run eagerly, unless the device itself is lost. The device is
a stand-in whose captures fail with torch's messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.errors import CaptureError
from tandem.core.execution import CAPTURED
from tandem.core.identity import Identity
from tandem.model.kernels.captured import Captured
from tandem.model.kernels.replayable import Function
from tandem.model.loaded import LoadedModel
from tandem.runtime.engine_loop import EngineLoop, is_fatal

REFUSED = """CUDA error: operation not permitted when stream is capturing
Search for `cudaErrorStreamCaptureUnsupported' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""  # noqa: E501
LOST = "CUDA error: an illegal memory access was encountered"


class Streams:
    """Tracks the current stream."""

    def __init__(self) -> None:
        self.current = "engine"

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before


class Graph:
    """A stand-in for a CUDA graph. ``captures`` holds the mode of each capture. A capture fails
    at its end, unless ``fails`` is False: then its functions have run at once and nothing is
    replayed."""

    captures: ClassVar[list[str]] = []
    fails = True

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.captures.append(capture_error_mode)

    def capture_end(self) -> None:
        if self.fails:
            raise torch.AcceleratorError(REFUSED)

    def replay(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Simulate a transfer whose peer waits for this host: waiting for the whole device would
    deadlock."""
    streams = Streams()
    monkeypatch.setattr(Graph, "captures", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 100))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("the host waits for itself"))
    return streams


def capturing(function: Function) -> Captured:
    return Captured(function, pool=None, stream="capture")


def test_nothing_waits_for_what_the_device_is_busy_with(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "fails", False)
    seen: list[str] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        seen.append(streams.current)
        return (x + 1,)

    captured = capturing(function)
    for _ in range(3):
        captured(torch.ones(2))
    assert captured.is_ready and seen == ["engine", "capture"] and streams.current == "engine"
    assert Graph.captures == ["thread_local"]


def test_no_program_is_made_where_memory_is_short(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached memory is released first. Capture is refused only if there is still too little."""
    told = iter([(10**6, 10**8), (10**6, 10**8), (10**6, 10**8), (3 * 10**6, 10**8)])
    monkeypatch.setattr(Graph, "fails", False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(told))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    captured = capturing(lambda x: (x + 1,))
    captured(torch.ones(2))
    with pytest.raises(CaptureError, match="less than 2% of the 0.1 GB on the GPU is free"):
        captured(torch.ones(2))
    captured(torch.ones(2))
    assert captured.is_ready and not list(told)


def test_a_failed_capture_leaves_the_stream_and_a_device_that_answers(streams: Streams) -> None:
    captured = capturing(lambda x: (x + 1,))
    captured(torch.ones(2))
    with pytest.raises(CaptureError, match="not permitted when stream is capturing") as caught:
        captured(torch.ones(2))
    assert not is_fatal(caught.value) and is_fatal(torch.AcceleratorError(REFUSED))
    assert streams.current == "engine" and not captured.is_ready


def test_a_device_that_is_lost_while_capturing_is_fatal(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def item(tensor: Tensor) -> Any:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(Tensor, "item", item)
    captured = capturing(lambda x: (x + 1,))
    captured(torch.ones(2))
    with pytest.raises(torch.AcceleratorError, match="illegal memory access") as caught:
        captured(torch.ones(2))
    assert is_fatal(caught.value)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("captured")
    tiny.write_tiny(folder, seed=21)
    return load(folder, "model.kernels=native")


def test_a_rank_that_cannot_capture_serves_on_without_graphs(
    loaded: LoadedModel, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [greedy(f"r{i}", list(range(5 + i, 25)), 30, ignore_eos=True) for i in range(3)]
    answers = Bench(loaded, max_rows=4).generate(*asked)
    kernels = copy(loaded.kernels)
    kernels.exec_mode = CAPTURED
    monkeypatch.setattr(kernels, "make_replayable", capturing)
    bench = Bench(replace(loaded, kernels=kernels, uncapturable={}), max_rows=4)
    loop = EngineLoop("engine")
    loop.add(bench.decode)
    loop.start()
    try:
        while "3 programs run eagerly" not in loop.post(
            lambda: bench.decode.programs.exec_mode_status
        ).result(60):
            loop.post(lambda: bench.decode.drop(Identity("nobody"))).result(60)
        assert "not permitted" in bench.decode.programs.exec_mode_status
        loop.post(lambda: None).result(60)
        assert loop.failure is None and loop.is_running
    finally:
        loop.stop()
    assert bench.generate(*asked) == answers
    bench.check_empty()
