"""Timing of work on a GPU, or on this CPU in a rehearsal."""

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]
MUCH_BYTES = 192 << 20
"""Several times the size of a GPU's last-level cache."""


class Device:
    def __init__(self, is_rehearsal: bool) -> None:
        self.is_rehearsal = is_rehearsal
        self.kind = torch.device("cpu" if is_rehearsal else "cuda")
        shape = (2, 2) if is_rehearsal else (MUCH_BYTES >> 14, 1 << 12)
        self._much = torch.zeros(shape, device=self.kind)
        self._sums = torch.zeros(shape[1], device=self.kind)

    @property
    def name(self) -> str:
        return "rehearsal" if self.is_rehearsal else torch.cuda.get_device_name()

    def settle(self) -> None:
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def time_s(self, work: Work, num_times: int = 20, num_warm: int = 3) -> float:
        """Return the median device time of one call in seconds; calls run one after another."""
        num_times, num_warm = (1, 0) if self.is_rehearsal else (num_times, num_warm)
        for _ in range(num_warm):
            work()
        self.settle()
        if self.is_rehearsal:
            return self.host_s(work, num_times)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        spans = zip(marks, marks[1:], strict=False)
        return statistics.median(began.elapsed_time(ended) for began, ended in spans) / 1e3

    def cold_s(self, work: Work, num_calls: int = 20) -> float:
        """Return the seconds of one call inside a graph, with a cold last-level cache.

        Other work before each call evicts its inputs from the cache. The host launches nothing.
        """
        if self.is_rehearsal:
            return self.time_s(work)
        for _ in range(2):
            work()
        alone = self._graph([self._read_much], num_calls)
        both = self._graph([self._read_much, work], num_calls)
        return (self.time_s(both.replay, 9) - self.time_s(alone.replay, 9)) / num_calls

    def _read_much(self) -> None:
        torch.sum(self._much, 0, out=self._sums)

    def _graph(self, works: list[Work], num_calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.settle()
        with torch.cuda.graph(graph):
            for work in works * num_calls:
                work()
        return graph

    def host_s(self, work: Work, num_times: int = 20) -> float:
        """Return the median host time in seconds, without waiting for the device."""
        times = []
        for _ in range(1 if self.is_rehearsal else num_times):
            self.settle()
            began_at = time.perf_counter()
            work()
            times.append(time.perf_counter() - began_at)
        self.settle()
        return statistics.median(times)

    def free(self) -> None:
        if not self.is_rehearsal:
            torch.cuda.empty_cache()
