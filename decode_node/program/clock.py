"""How long the device took, told by its own clock where it has one."""

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """The moment in which the device has come this far; a CPU computes while the host calls it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def settle(device: torch.device) -> None:
    """Wait until the device has done all that this thread has given it."""
    moment = now(device)
    wait(moment, moment)


def wait(began: Moment, ended: Moment) -> float:
    """Wait for the end of a span; its seconds."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
