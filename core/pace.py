"""How far a rank's engine has come, and when it counts as stuck (design.md, Progress)."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

STUCK_FACTOR = 10
"""A turn of the engine may take this many times the longest recent one."""
LOADING = "loading weights"
on_start: ContextVar[Callable[[str, float], None]] = ContextVar(
    "on_start", default=lambda doing, progress: None
)
"""Is told what a rank does as it starts and how far that is: of LOADING a share, of all else a
number that changes as long as it gets on. Whoever starts a rank sets it."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """How far a rank is in what its gang does in lockstep: collective ``number`` of step ``step``
    has begun. ``what`` it was; 0 is waiting for the plan."""

    step: int = 0
    number: int = 0
    what: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"step {self.step}, collective {self.number} ({self.what or 'plan'})"


@dataclass(frozen=True, slots=True)
class Pace:
    """``num_turns`` of the engine thread have ended; ``busy_s`` is the age of the one it is in, 0
    while it waits for work; ``bound_s`` is the age from which on it is stuck. ``place`` is where
    it is in lockstep."""

    num_turns: int
    busy_s: float
    bound_s: float
    place: Place = Place()

    @property
    def is_stuck(self) -> bool:
        return self.busy_s > self.bound_s

    def __str__(self) -> str:
        return f"in one step for {self.busy_s:.0f} s, {self.bound_s:.0f} s are the bound"


def bound_of(recent_s: Iterable[float], least_s: float) -> float:
    """The bound after turns that took these; long prefill steps raise it."""
    return max(least_s, STUCK_FACTOR * max(recent_s, default=0.0))
