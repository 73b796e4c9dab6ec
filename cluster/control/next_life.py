"""What follows a life of a gang: a pure decision over how it ended and what came before."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.control.verdict import FATAL, LastWords
from core.errors import NodeLost, Overloaded, ProgramFailed

MISTAKE, NO_ROOM, FAULT, OUTSIDE = "mistake", "no room", "fault", "outside"
"""What ends a life: the user's config, want of room, an error of the ranks' own, all else (a
SIGKILL, a lost machine, silence)."""
CREATION = "creation task"
"""Of Ray's word on an actor whose own code kept it from ever being there."""
PAUSE_S = 1.0
MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True, slots=True)
class History:
    """Whether a life of a gang was ever ready; of those since one that served for long, how many
    died, want of room apart, and how many of these by a fault of their own."""

    has_served: bool = False
    num_deaths: int = 0
    num_faults: int = 0


def blame(error: Exception, words: Sequence[LastWords]) -> str:
    """Why a life ended with ``error``, where its dead ranks left these ``words``."""
    if isinstance(error, ValueError):
        return MISTAKE
    if isinstance(error, Overloaded):
        return NO_ROOM
    is_outside = isinstance(error, NodeLost | TimeoutError) and not isinstance(error, ProgramFailed)
    is_fatal = CREATION in str(error) or any(FATAL in said.log for said in words)
    return OUTSIDE if is_outside and not is_fatal else FAULT


def next_life(
    history: History, why: str, served_s: float | None, min_service_s: float
) -> tuple[History, float | None]:
    """After a life that ended because of ``why`` and was ready for ``served_s`` seconds, None if it
    never was: the pause before the next one, None if somebody has to attach first. Pauses grow with
    faults in a row; nothing from outside makes them longer."""
    has_served = history.has_served or served_s is not None
    if served_s is not None and served_s >= min_service_s:
        history = History()
    num_faults = history.num_faults + (why == FAULT)
    now = History(has_served, history.num_deaths + (why != NO_ROOM), num_faults)
    if why == MISTAKE or (why == NO_ROOM and not has_served):
        return now, None
    return now, min(MAX_BACK_OFF_S, PAUSE_S * 2 ** min(num_faults, 10)) if why == FAULT else PAUSE_S
