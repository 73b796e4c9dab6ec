"""What follows the end of a life: who is to blame, whether and when the next one begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.next_life import (
    FAULT,
    MAX_BACK_OFF_S,
    MISTAKE,
    NO_ROOM,
    OUTSIDE,
    PAUSE_S,
    History,
    blame,
    next_life,
)
from cluster.control.verdict import LastWords
from core.errors import EpochEnded, NodeLost, Overloaded, ProgramFailed, StepFailed, TandemError
from core.membership import DOWN, LOST, STARTING, Gang

SEGFAULT = LastWords("Fatal Python error: Segmentation fault\n\nCurrent thread")
KILLED = LastWords("loading weights\n")
UNBORN = "decode-0.5.0: The actor died because of an error raised in its creation task"
ENDS = (MISTAKE, NO_ROOM, FAULT, OUTSIDE)


@pytest.mark.parametrize(
    ("error", "words", "why"),
    [
        (ValueError("model.path: there is no such folder"), [], MISTAKE),
        (Overloaded("no room"), [], NO_ROOM),
        (NodeLost("the actor died"), [KILLED], OUTSIDE),
        (NodeLost("the actor died"), [], OUTSIDE),
        (NodeLost("the actor died"), [KILLED, SEGFAULT], FAULT),
        (NodeLost(UNBORN), [], FAULT),
        (NodeLost("rank 1: no answer for 10 s"), [], OUTSIDE),
        (TimeoutError(), [], OUTSIDE),
        (EpochEnded("closed by peer"), [KILLED], OUTSIDE),
        (EpochEnded("closed by peer"), [SEGFAULT], FAULT),
        (ProgramFailed("cosmic ray"), [], FAULT),
        (StepFailed("the engine stopped"), [KILLED], FAULT),
        (TandemError("RuntimeError: cosmic ray"), [], FAULT),
    ],
)
def test_who_is_to_blame(error: Exception, words: list[LastWords], why: str) -> None:
    assert blame(error, words) == why


def test_pauses_grow_with_faults_alone_and_stay_below_a_minute() -> None:
    history, pauses = History(), []
    for why in (FAULT, OUTSIDE, FAULT, NO_ROOM, FAULT, OUTSIDE, *[FAULT] * 2000):
        history, pause_s = next_life(history, why, 1.0, 60.0)
        pauses.append(pause_s)
    assert pauses[:8] == [2.0, PAUSE_S, 4.0, PAUSE_S, 8.0, PAUSE_S, 16.0, 32.0]
    assert set(pauses[8:]) == {MAX_BACK_OFF_S}
    assert next_life(history, FAULT, 60.0, 60.0) == (History(True, 1, 1), 2.0)


@given(st.lists(st.tuples(st.sampled_from(ENDS), st.none() | st.floats(0, 100)), max_size=20))
def test_only_a_mistake_or_want_of_room_at_the_first_start_is_final(
    lives: list[tuple[str, float | None]],
) -> None:
    history = History()
    for i, (why, served_s) in enumerate(lives):
        before, (history, pause_s) = history, next_life(history, why, served_s, 60.0)
        has_served = any(one is not None for _, one in lives[: i + 1])
        is_final = why == MISTAKE or (why == NO_ROOM and not has_served)
        assert (pause_s is None) == is_final
        if pause_s is not None:
            assert PAUSE_S <= pause_s <= MAX_BACK_OFF_S
            assert why == FAULT or pause_s == PAUSE_S
        fresh = served_s is not None and served_s >= 60
        assert history.num_deaths == (0 if fresh else before.num_deaths) + (why != NO_ROOM)
        assert history.num_faults <= history.num_deaths <= len(lives)


@pytest.mark.parametrize(
    ("state", "num_deaths", "given_up"),
    [(DOWN, 0, True), (LOST, 2, False), (LOST, 3, True), (STARTING, 7, True), (STARTING, 0, False)],
)
def test_who_starts_it_waits_for_so_many_deaths(
    state: str, num_deaths: int, given_up: bool
) -> None:
    assert Gang("d", "decode", 1, state, num_deaths=num_deaths).is_given_up(3) == given_up
