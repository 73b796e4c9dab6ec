"""Capture of work that runs in parallel to a step's main stream, with a stand-in for CUDA
streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tandem.model.kernels.gpu.kernels import TritonKernels


class Streams:
    """Records the calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.main = self.current = Stream(self, "main")

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self.name = streams, name

    def wait_stream(self, other: "Stream") -> None:
        self._streams.calls.append(f"{self.name} waits for {other.name}")


def test_a_branch_waits_for_the_step_and_the_step_for_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, value = Streams(), torch.ones(1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(streams, "side"))
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def work(what: str) -> torch.Tensor:
        streams.calls.append(f"{what} on {streams.current.name}")
        return value

    kernels = TritonKernels(1)
    for _ in range(2):
        result = kernels.run_concurrently(lambda: work("shared experts"))
        work("routed experts")
        assert result() is value
    branch = ["side waits for main", "shared experts on side", "routed experts on main"]
    assert streams.calls == [*branch, "main waits for side"] * 2
    streams.calls.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernels.run_concurrently(lambda: work("shared experts"))() is value
    assert streams.calls == ["shared experts on main"]
