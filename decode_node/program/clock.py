"""Device timing. CUDA devices are timed by events, CPUs by the host's clock."""

import time

import torch

DeviceTimestamp = float | torch.cuda.Event


def timestamp(device: torch.device) -> DeviceTimestamp:
    """Record the time at which the device completes the work issued so far.

    On a CPU this work is already complete, so the time is now.
    """
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed all work that this thread has issued."""
    moment = timestamp(device)
    elapsed_s(moment, moment)


def elapsed_s(started_at: DeviceTimestamp, ended_at: DeviceTimestamp) -> float:
    """Wait for ``ended_at``; return the seconds since ``started_at``."""
    if isinstance(started_at, float):
        assert isinstance(ended_at, float)
        return ended_at - started_at
    assert isinstance(ended_at, torch.cuda.Event)
    ended_at.synchronize()
    return started_at.elapsed_time(ended_at) / 1e3
