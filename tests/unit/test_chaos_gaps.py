"""Attribution of a gap in a stream to its causes, in the report of a chaos run."""

import pytest

from tests.chaos.gaps import (
    COMPARED_PAIRS,
    DETECTION,
    GATEWAY,
    LATE,
    LEAVING,
    PAUSE,
    QUEUE,
    READ,
    STARTING,
    UNKNOWN,
    WARMING,
    Event,
    parts,
    parts_of_longest,
)
from tests.faults.timeline import ATTEMPT, ENDED, GRANTED, PIECE, ROUTING


def events(*told: tuple[float, str], pid: int = 1) -> list[Event]:
    return [{"at": at, "event": event, "pid": pid, "request": "a"} for at, event in told]


BEGUN = events((0, ROUTING), (1, ATTEMPT), (2, GRANTED), (3, PIECE))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], {LATE: 10}),
        (
            events((14, ENDED), (15, ROUTING), (17, ATTEMPT), (18, GRANTED), (20, PIECE)),
            {DETECTION: 4, PAUSE: 1, WARMING: 2, QUEUE: 1, READ: 2},
        ),
        (
            events((11, ENDED), (11, ROUTING), (12, ATTEMPT), (18, ENDED), (19, ROUTING)),
            {DETECTION: 1 + 6, PAUSE: 1, WARMING: 1 + 1},
        ),
        (
            events((16, ROUTING), (16, ATTEMPT), (19, GRANTED), pid=2),
            {GATEWAY: 6, QUEUE: 3, READ: 1},
        ),
    ],
    ids=["nothing happened", "one loss", "two losses", "another gateway"],
)
def test_each_moment_of_a_gap_has_a_part(more: list[Event], expected: dict[str, float]) -> None:
    found = parts([*BEGUN, *more], [], 10, 20)
    assert {part: seconds for part, seconds in found.items() if seconds} == expected


def test_the_longest_tenth_counts() -> None:
    told = [{"request_id": "a", "gap_at": 10.0, "gap_s": 1.0 + i} for i in range(19)]
    assert parts_of_longest(told, BEGUN, []) == {LATE: "19.0 s, 100 %"}


def test_a_time_without_a_pair_belongs_to_the_state_of_the_gangs() -> None:
    lives = [(0, "ready"), (13, "lost"), (15, "starting"), (18, "ready")]
    gangs = [{"at": at, "gang": "prefill-0", "state": state} for at, state in lives]
    gangs += [
        {"at": 0, "gang": f"decode-{i}", "state": state} for i, state in enumerate(COMPARED_PAIRS)
    ]
    routing = events((11, ENDED), (11, ROUTING), (19, ATTEMPT))
    found = parts([*BEGUN, *routing], gangs, 10, 20)
    assert found == {
        DETECTION: 1,
        PAUSE: 0,
        UNKNOWN: 2,
        LEAVING: 2,
        STARTING: 3,
        WARMING: 1,
        QUEUE: 1,
    }
