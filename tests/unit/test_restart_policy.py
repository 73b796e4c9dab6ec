"""Decisions after the end of an epoch: its cause, and whether and when the next epoch starts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.control.failure import (
    EXTERNAL,
    INTERNAL_FAULT,
    NO_CAPACITY,
    USER_ERROR,
    CrashReport,
    EpochFailure,
)
from tandem.cluster.control.restart_policy import (
    MAX_BACK_OFF_S,
    PAUSE_S,
    RestartDecision,
    RestartHistory,
    decide_restart,
)
from tandem.core.errors import (
    EpochEnded,
    Overloaded,
    ProgramFailed,
    RankLost,
    StepFailed,
    TandemError,
)

SEGFAULT = CrashReport("Fatal Python error: Segmentation fault\n\nCurrent thread")
KILLED = CrashReport("loading weights\n")
UNBORN = "decode-0.5.0: The actor died because of an error raised in its creation task"
ENDS = {
    USER_ERROR: ValueError("model.path: there is no such folder"),
    NO_CAPACITY: Overloaded("no room"),
    INTERNAL_FAULT: StepFailed("the engine stopped"),
    EXTERNAL: RankLost("the actor died"),
}
PROVEN_S = 60.0
"""Seconds of service after which the failure count is reset."""


@pytest.mark.parametrize(
    ("error", "reports", "category"),
    [
        (ValueError("model.path: there is no such folder"), [], USER_ERROR),
        (Overloaded("no room"), [], NO_CAPACITY),
        (RankLost("the actor died"), [KILLED], EXTERNAL),
        (RankLost("the actor died"), [], EXTERNAL),
        (RankLost("the actor died"), [KILLED, SEGFAULT], INTERNAL_FAULT),
        (RankLost(UNBORN), [], INTERNAL_FAULT),
        (RankLost("rank 1: no answer for 10 s"), [], EXTERNAL),
        (TimeoutError(), [], EXTERNAL),
        (EpochEnded("closed by peer"), [KILLED], EXTERNAL),
        (EpochEnded("closed by peer"), [SEGFAULT], INTERNAL_FAULT),
        (ProgramFailed("cosmic ray"), [], INTERNAL_FAULT),
        (StepFailed("the engine stopped"), [KILLED], INTERNAL_FAULT),
        (TandemError("RuntimeError: cosmic ray"), [], INTERNAL_FAULT),
    ],
)
def test_who_is_to_blame(error: Exception, reports: list[CrashReport], category: str) -> None:
    failed_epoch = EpochFailure(error, reports=tuple(reports))
    assert failed_epoch.category == category
    tails = "".join(f"\n{said.log.strip()}" for said in reports)
    assert failed_epoch.failure.text == f"{error}{tails}"


class Played:
    """A gang's ``history`` over epochs that follow a simulated clock."""

    def __init__(self, has_served: bool = False) -> None:
        self.history = RestartHistory(has_served)
        self.now = 1000.0

    def live(self, served_s: float | None, category: str, left: frozenset[int]) -> RestartDecision:
        """Play an epoch that was ready for ``served_s`` (None: never) and return the decision after
        it."""
        if served_s is not None:
            stable_at = self.now + PROVEN_S
            self.history = replace(self.history, has_served=True, stable_at=stable_at)
        self.now += served_s or 0.0
        decision = decide_restart(self.history, EpochFailure(ENDS[category], left), self.now)
        self.history = decision.history
        assert self.history.stable_at is None
        return decision


ONE = [PAUSE_S]
RUNS = {
    # (seconds that each epoch was ready or None, cause of its end): pauses, reported failures.
    "SIGKILL of any rank every 8 s": ([(6.0, EXTERNAL)] * 12, ONE * 12, 12),
    "of one rank every 3 s, mostly as it starts": (
        [(40.0, EXTERNAL), *[(None, EXTERNAL), (None, EXTERNAL), (0.5, EXTERNAL)] * 6],
        ONE * 19,
        19,
    ),
    "one rank again and again, which serves for long between": (
        [(61.0, EXTERNAL)] * 5,
        ONE * 5,
        1,
    ),
    "own faults in a row": (
        [(1.0, INTERNAL_FAULT)] * 2000,
        [2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_BACK_OFF_S] * 1995],
        2000,
    ),
    "own faults, never ready": ([(None, INTERNAL_FAULT)] * 3, [2.0, 4.0, 8.0], 3),
    "own faults, the third after long service": (
        [
            (1.0, INTERNAL_FAULT),
            (1.0, INTERNAL_FAULT),
            (60.0, INTERNAL_FAULT),
            (1.0, INTERNAL_FAULT),
        ],
        [2.0, 4.0, 2.0, 4.0],
        2,
    ),
    "own faults between deaths from outside": (
        [
            (1.0, INTERNAL_FAULT),
            (1.0, EXTERNAL),
            (1.0, INTERNAL_FAULT),
            (None, NO_CAPACITY),
            (1.0, INTERNAL_FAULT),
        ],
        [2.0, PAUSE_S, 4.0, PAUSE_S, 8.0],
        4,
    ),
    "no room after its machine was lost": (
        [(200.0, EXTERNAL), *[(None, NO_CAPACITY)] * 4, (5.0, EXTERNAL)],
        ONE * 6,
        2,
    ),
    "no room at the first start": ([(None, NO_CAPACITY)], [None], 0),
    "no room after it died unready": ([(None, EXTERNAL), (None, NO_CAPACITY)], [PAUSE_S, None], 1),
    "the user's mistake": ([(None, USER_ERROR)], [None], 1),
    "the user's mistake after faults": (
        [(1.0, INTERNAL_FAULT), (None, USER_ERROR)],
        [2.0, None],
        2,
    ),
}


@pytest.mark.parametrize(("lives", "pauses", "num_failures"), RUNS.values(), ids=RUNS)
def test_the_deaths_of_a_run_are_followed_by(
    lives: list[tuple[float | None, str]], pauses: list[float | None], num_failures: int
) -> None:
    played, left = Played(), frozenset({0, 2})
    decisions = [played.live(served_s, category, left) for served_s, category in lives]
    assert [decision.pause_s for decision in decisions] == pauses
    assert played.history.num_failures == num_failures
    for decision in decisions:
        assert decision.kept_ranks == (frozenset() if decision.pause_s is None else left)


def test_who_is_attached_to_again_has_its_deaths_forgotten_and_not_that_it_served() -> None:
    played = Played(has_served=True)
    assert played.live(None, NO_CAPACITY, frozenset()).pause_s == PAUSE_S
    assert Played().live(None, NO_CAPACITY, frozenset()).pause_s is None


@given(st.lists(st.tuples(st.sampled_from(list(ENDS)), st.none() | st.floats(0, 100)), max_size=20))
def test_only_a_mistake_or_want_of_room_at_the_first_start_is_final(
    lives: list[tuple[str, float | None]],
) -> None:
    played = Played()
    for i, (category, served_s) in enumerate(lives):
        before, pause_s = played.history, played.live(served_s, category, frozenset()).pause_s
        has_served = any(one is not None for _, one in lives[: i + 1])
        is_final = category == USER_ERROR or (category == NO_CAPACITY and not has_served)
        assert (pause_s is None) == is_final
        if pause_s is not None:
            assert PAUSE_S <= pause_s <= MAX_BACK_OFF_S
            assert category == INTERNAL_FAULT or pause_s == PAUSE_S
        fresh = served_s is not None and served_s >= PROVEN_S
        history = played.history
        assert history.num_failures == (0 if fresh else before.num_failures) + (
            category != NO_CAPACITY
        )
        assert history.num_faults <= history.num_failures <= len(lives)
