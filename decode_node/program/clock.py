"""How long the device took, told by its own clock where it has one."""

import time

import torch

DeviceTimestamp = float | torch.cuda.Event


def timestamp(device: torch.device) -> DeviceTimestamp:
    """The moment in which the device has come this far; a CPU computes while the host calls it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that this thread has given it."""
    moment = timestamp(device)
    elapsed_s(moment, moment)


def elapsed_s(started_at: DeviceTimestamp, ended_at: DeviceTimestamp) -> float:
    """Wait for the end of a span; its seconds."""
    if isinstance(started_at, float):
        assert isinstance(ended_at, float)
        return ended_at - started_at
    assert isinstance(ended_at, torch.cuda.Event)
    ended_at.synchronize()
    return started_at.elapsed_time(ended_at) / 1e3
