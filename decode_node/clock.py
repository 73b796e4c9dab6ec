"""How long the device took, told by its own clock where it has one."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

Moment = float | torch.cuda.Event


class Span(Protocol):
    """From one moment of the device to another."""

    def wait(self) -> float:
        """Wait for its end; seconds."""
        ...


@dataclass(frozen=True, slots=True)
class HostSpan:
    """Of a device that computes while the host calls it."""

    seconds: float

    def wait(self) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class EventSpan:
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self) -> float:
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


class DeviceClock:
    """Moments in the order in which the device reaches them."""

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"

    def now(self) -> Moment:
        if self._on_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def since(self, began: Moment) -> Span:
        ended = self.now()
        if isinstance(began, float):
            assert isinstance(ended, float)
            return HostSpan(ended - began)
        assert isinstance(ended, torch.cuda.Event)
        return EventSpan(began, ended)
