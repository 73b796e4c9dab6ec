"""What follows the end of a life: who is to blame, whether and when the next one begins."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.control.next_life import MAX_BACK_OFF_S, PAUSE_S, Decision, History, next_life
from tandem.cluster.control.verdict import FAULT, MISTAKE, NO_ROOM, OUTSIDE, Death, LastWords
from tandem.core.errors import (
    EpochEnded,
    Overloaded,
    ProgramFailed,
    RankLost,
    StepFailed,
    TandemError,
)

SEGFAULT = LastWords("Fatal Python error: Segmentation fault\n\nCurrent thread")
KILLED = LastWords("loading weights\n")
UNBORN = "decode-0.5.0: The actor died because of an error raised in its creation task"
ENDS = {
    MISTAKE: ValueError("model.path: there is no such folder"),
    NO_ROOM: Overloaded("no room"),
    FAULT: StepFailed("the engine stopped"),
    OUTSIDE: RankLost("the actor died"),
}
PROVEN_S = 60.0
"""A life that was ready for so long has served for long."""


@pytest.mark.parametrize(
    ("error", "words", "why"),
    [
        (ValueError("model.path: there is no such folder"), [], MISTAKE),
        (Overloaded("no room"), [], NO_ROOM),
        (RankLost("the actor died"), [KILLED], OUTSIDE),
        (RankLost("the actor died"), [], OUTSIDE),
        (RankLost("the actor died"), [KILLED, SEGFAULT], FAULT),
        (RankLost(UNBORN), [], FAULT),
        (RankLost("rank 1: no answer for 10 s"), [], OUTSIDE),
        (TimeoutError(), [], OUTSIDE),
        (EpochEnded("closed by peer"), [KILLED], OUTSIDE),
        (EpochEnded("closed by peer"), [SEGFAULT], FAULT),
        (ProgramFailed("cosmic ray"), [], FAULT),
        (StepFailed("the engine stopped"), [KILLED], FAULT),
        (TandemError("RuntimeError: cosmic ray"), [], FAULT),
    ],
)
def test_who_is_to_blame(error: Exception, words: list[LastWords], why: str) -> None:
    death = Death(error, words=tuple(words))
    assert death.why == why
    tails = "".join(f"\n{said.log.strip()}" for said in words)
    assert death.failure.text == f"{error}{tails}"


class Played:
    """A gang's ``history`` while it lives and dies by a clock of its own."""

    def __init__(self, has_served: bool = False) -> None:
        self.history = History(has_served)
        self.now = 1000.0

    def live(self, served_s: float | None, why: str, left: frozenset[int]) -> Decision:
        """A life that was ready for so long, or never, and the decision after it."""
        if served_s is not None:
            proven_at = self.now + PROVEN_S
            self.history = replace(self.history, has_served=True, proven_at=proven_at)
        self.now += served_s or 0.0
        decision = next_life(self.history, Death(ENDS[why], left), self.now)
        self.history = decision.history
        assert self.history.proven_at is None
        return decision


ONE = [PAUSE_S]
RUNS = {
    # (seconds for which each life was ready or None, why it ended): the pauses, the deaths told.
    "SIGKILL of any rank every 8 s": ([(6.0, OUTSIDE)] * 12, ONE * 12, 12),
    "of one rank every 3 s, mostly as it starts": (
        [(40.0, OUTSIDE), *[(None, OUTSIDE), (None, OUTSIDE), (0.5, OUTSIDE)] * 6],
        ONE * 19,
        19,
    ),
    "one rank again and again, which serves for long between": (
        [(61.0, OUTSIDE)] * 5,
        ONE * 5,
        1,
    ),
    "own faults in a row": (
        [(1.0, FAULT)] * 2000,
        [2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_BACK_OFF_S] * 1995],
        2000,
    ),
    "own faults, never ready": ([(None, FAULT)] * 3, [2.0, 4.0, 8.0], 3),
    "own faults, the third after long service": (
        [(1.0, FAULT), (1.0, FAULT), (60.0, FAULT), (1.0, FAULT)],
        [2.0, 4.0, 2.0, 4.0],
        2,
    ),
    "own faults between deaths from outside": (
        [(1.0, FAULT), (1.0, OUTSIDE), (1.0, FAULT), (None, NO_ROOM), (1.0, FAULT)],
        [2.0, PAUSE_S, 4.0, PAUSE_S, 8.0],
        4,
    ),
    "no room after its machine was lost": (
        [(200.0, OUTSIDE), *[(None, NO_ROOM)] * 4, (5.0, OUTSIDE)],
        ONE * 6,
        2,
    ),
    "no room at the first start": ([(None, NO_ROOM)], [None], 0),
    "no room after it died unready": ([(None, OUTSIDE), (None, NO_ROOM)], [PAUSE_S, None], 1),
    "the user's mistake": ([(None, MISTAKE)], [None], 1),
    "the user's mistake after faults": ([(1.0, FAULT), (None, MISTAKE)], [2.0, None], 2),
}


@pytest.mark.parametrize(("lives", "pauses", "num_deaths"), RUNS.values(), ids=RUNS)
def test_the_deaths_of_a_run_are_followed_by(
    lives: list[tuple[float | None, str]], pauses: list[float | None], num_deaths: int
) -> None:
    played, left = Played(), frozenset({0, 2})
    decisions = [played.live(served_s, why, left) for served_s, why in lives]
    assert [decision.pause_s for decision in decisions] == pauses
    assert played.history.num_deaths == num_deaths
    for decision in decisions:
        assert decision.kept == (frozenset() if decision.pause_s is None else left)


def test_who_is_attached_to_again_has_its_deaths_forgotten_and_not_that_it_served() -> None:
    played = Played(has_served=True)
    assert played.live(None, NO_ROOM, frozenset()).pause_s == PAUSE_S
    assert Played().live(None, NO_ROOM, frozenset()).pause_s is None


@given(st.lists(st.tuples(st.sampled_from(list(ENDS)), st.none() | st.floats(0, 100)), max_size=20))
def test_only_a_mistake_or_want_of_room_at_the_first_start_is_final(
    lives: list[tuple[str, float | None]],
) -> None:
    played = Played()
    for i, (why, served_s) in enumerate(lives):
        before, pause_s = played.history, played.live(served_s, why, frozenset()).pause_s
        has_served = any(one is not None for _, one in lives[: i + 1])
        is_final = why == MISTAKE or (why == NO_ROOM and not has_served)
        assert (pause_s is None) == is_final
        if pause_s is not None:
            assert PAUSE_S <= pause_s <= MAX_BACK_OFF_S
            assert why == FAULT or pause_s == PAUSE_S
        fresh = served_s is not None and served_s >= PROVEN_S
        history = played.history
        assert history.num_deaths == (0 if fresh else before.num_deaths) + (why != NO_ROOM)
        assert history.num_faults <= history.num_deaths <= len(lives)
