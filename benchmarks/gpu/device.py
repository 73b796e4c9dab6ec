"""A GPU, or in a rehearsal this CPU: how long work takes there."""

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]


class Device:
    def __init__(self, is_rehearsal: bool) -> None:
        self.is_rehearsal = is_rehearsal
        self.kind = torch.device("cpu" if is_rehearsal else "cuda")

    @property
    def name(self) -> str:
        return "rehearsal" if self.is_rehearsal else torch.cuda.get_device_name()

    def settle(self) -> None:
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def time_s(self, work: Work, num_times: int = 20, num_warm: int = 3) -> float:
        """Median seconds of the device, one call after the other."""
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

    def host_s(self, work: Work, num_times: int = 20) -> float:
        """Median seconds of the host, which does not wait for the device."""
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
