"""What follows a life of a gang: a pure decision over how it ended and what came before."""

from dataclasses import dataclass

from tandem.cluster.control.failure import INTERNAL_FAULT, NO_CAPACITY, USER_ERROR, EpochFailure

PAUSE_S = 1.0
MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """Whether a life of a gang was ever ready, and the moment at which the present one will have
    served for long, None before it is ready; of those since one that did, how many died, want of
    room apart, and how many of these by a fault of their own."""

    has_served: bool = False
    stable_at: float | None = None
    num_failures: int = 0
    num_faults: int = 0


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The ``history`` from now on; the pause before the next life, None if this one was the last
    until somebody attaches; the ranks ``kept`` for it, all others are killed."""

    history: RestartHistory
    pause_s: float | None
    kept_ranks: frozenset[int]


def decide_restart(
    history: RestartHistory, failed_epoch: EpochFailure, now: float
) -> RestartDecision:
    """After a life that ended ``now``. Pauses grow with faults in a row; nothing from outside makes
    them longer. Only the user's mistake, and want of room for who never served, are final."""
    category, has_served = failed_epoch.category, history.has_served
    if history.stable_at is not None and now >= history.stable_at:
        history = RestartHistory()
    num_failures = history.num_failures + (category != NO_CAPACITY)
    num_faults = history.num_faults + (category == INTERNAL_FAULT)
    after = RestartHistory(has_served, None, num_failures, num_faults)
    if category == USER_ERROR or (category == NO_CAPACITY and not has_served):
        return RestartDecision(after, None, frozenset())
    back_off_s = min(MAX_BACK_OFF_S, PAUSE_S * 2 ** min(num_faults, 10))
    return RestartDecision(
        after, back_off_s if category == INTERNAL_FAULT else PAUSE_S, failed_epoch.survivors
    )
