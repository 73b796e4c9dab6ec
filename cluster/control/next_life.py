"""What follows a life of a gang: a pure decision over how it ended and what came before."""

from dataclasses import dataclass

from tandem.cluster.control.verdict import FAULT, MISTAKE, NO_ROOM, Death

PAUSE_S = 1.0
MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True, slots=True)
class History:
    """Whether a life of a gang was ever ready, and the moment at which the present one will have
    served for long, None before it is ready; of those since one that did, how many died, want of
    room apart, and how many of these by a fault of their own."""

    has_served: bool = False
    proven_at: float | None = None
    num_deaths: int = 0
    num_faults: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The ``history`` from now on; the pause before the next life, None if this one was the last
    until somebody attaches; the ranks ``kept`` for it, all others are killed."""

    history: History
    pause_s: float | None
    kept: frozenset[int]


def next_life(history: History, death: Death, now: float) -> Decision:
    """After a life that ended ``now``. Pauses grow with faults in a row; nothing from outside makes
    them longer. Only the user's mistake, and want of room for who never served, are final."""
    why, has_served = death.why, history.has_served
    if history.proven_at is not None and now >= history.proven_at:
        history = History()
    num_deaths = history.num_deaths + (why != NO_ROOM)
    num_faults = history.num_faults + (why == FAULT)
    after = History(has_served, None, num_deaths, num_faults)
    if why == MISTAKE or (why == NO_ROOM and not has_served):
        return Decision(after, None, frozenset())
    back_off_s = min(MAX_BACK_OFF_S, PAUSE_S * 2 ** min(num_faults, 10))
    return Decision(after, back_off_s if why == FAULT else PAUSE_S, death.left)
