"""Decision on the restart of a gang: a pure function of how its epoch ended and of its history."""

from dataclasses import dataclass

from tandem.cluster.control.failure import INTERNAL_FAULT, NO_CAPACITY, USER_ERROR, EpochFailure

PAUSE_S = 1.0
MAX_BACK_OFF_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """History of a gang.

    Attributes:
        has_served: Whether any epoch was ever ready.
        stable_at: Time at which the current epoch counts as stable; None before it is ready.
        num_failures: Epochs that ended since the last stable one, except for lack of capacity.
        num_faults: Number of these that ended because of a fault of the ranks themselves.
    """

    has_served: bool = False
    stable_at: float | None = None
    num_failures: int = 0
    num_faults: int = 0


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """Decision after an epoch.

    Attributes:
        history: History of the gang from here on.
        pause_s: Seconds before the next epoch; None if there is none until a gateway attaches.
        kept_ranks: Ranks that the next epoch keeps. All others are killed.
    """

    history: RestartHistory
    pause_s: float | None
    kept_ranks: frozenset[int]


def decide_restart(
    history: RestartHistory, failed_epoch: EpochFailure, now: float
) -> RestartDecision:
    """Decide on the restart after an epoch that ended at ``now``.

    Pauses grow with consecutive faults of the ranks. External causes do not make them longer. The
    gang is not restarted after a mistake of the user, or if it has never served and there is no
    capacity for it.
    """
    category = failed_epoch.category
    has_served = history.has_served
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
