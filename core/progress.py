"""Progress of a rank's engine and of its startup, and when an engine counts as stalled."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

STALL_FACTOR = 10
"""Multiple of the longest recent engine turn above which a turn counts as stalled.

A turn is one iteration of the engine thread's loop.
"""
LOADING = "loading weights"
on_startup_progress: ContextVar[Callable[[str, float], None]] = ContextVar(
    "on_start", default=lambda activity, progress: None
)
"""Callback ``(activity, progress)`` that the startup of a rank calls.

The code that starts the rank sets it. For the activity LOADING, ``progress`` is a fraction. For all
others it is a number that changes while the activity makes progress.
"""


@dataclass(frozen=True, slots=True, order=True)
class LockstepPosition:
    """Position of a rank in its gang's lockstep.

    Attributes:
        step: Number of the step.
        number: Number of the latest collective that has started in this step; 0: the rank waits for
            the plan.
        operation: Name of that collective.
    """

    step: int = 0
    number: int = 0
    operation: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"step {self.step}, collective {self.number} ({self.operation or 'plan'})"


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Progress of the engine thread. A turn is one iteration of its loop.

    Attributes:
        num_turns: Turns completed.
        busy_s: Age of the current turn in seconds, 0 while waiting for work.
        stall_threshold_s: Age in seconds above which a turn counts as stalled.
        position: Position in the gang's lockstep.
    """

    num_turns: int
    busy_s: float
    stall_threshold_s: float
    position: LockstepPosition = LockstepPosition()

    @property
    def is_stalled(self) -> bool:
        return self.busy_s > self.stall_threshold_s

    def __str__(self) -> str:
        return f"in one step for {self.busy_s:.0f} s (limit {self.stall_threshold_s:.0f} s)"


def compute_stall_threshold_s(recent_s: Iterable[float], min_s: float) -> float:
    """Return STALL_FACTOR times the longest of ``recent_s``, at least ``min_s``, in seconds.

    ``recent_s`` are the durations of recent engine turns. Long prefill steps raise the threshold.
    """
    return max(min_s, STALL_FACTOR * max(recent_s, default=0.0))
