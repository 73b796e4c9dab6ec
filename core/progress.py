"""How far a rank's engine has come, and when it counts as stuck (design.md, Progress)."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

STALL_FACTOR = 10
"""A turn of the engine may take this many times the longest recent one."""
LOADING = "loading weights"
on_startup_progress: ContextVar[Callable[[str, float], None]] = ContextVar(
    "on_start", default=lambda activity, progress: None
)
"""Is told what a rank does as it starts and how far that is: of LOADING a share, of all else a
number that changes as long as it gets on. Whoever starts a rank sets it."""


@dataclass(frozen=True, slots=True, order=True)
class LockstepPosition:
    """How far a rank is in what its gang does in lockstep: collective ``number`` of step ``step``
    has begun. ``what`` it was; 0 is waiting for the plan."""

    step: int = 0
    number: int = 0
    operation: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"step {self.step}, collective {self.number} ({self.operation or 'plan'})"


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """``num_turns`` of the engine thread have ended; ``busy_s`` is the age of the one it is in, 0
    while it waits for work; ``bound_s`` is the age from which on it is stuck. ``place`` is where
    it is in lockstep."""

    num_turns: int
    busy_s: float
    stall_threshold_s: float
    position: LockstepPosition = LockstepPosition()

    @property
    def is_stalled(self) -> bool:
        return self.busy_s > self.stall_threshold_s

    def __str__(self) -> str:
        return f"in one step for {self.busy_s:.0f} s, {self.stall_threshold_s:.0f} s are the bound"


def compute_stall_threshold_s(recent_s: Iterable[float], min_s: float) -> float:
    """The bound after turns that took these; long prefill steps raise it."""
    return max(min_s, STALL_FACTOR * max(recent_s, default=0.0))
