"""Attribute the longest gaps of streams to the events that gateways record.

A gap is the longest time between two pieces of an answer. Each moment of it counts for the latest
event of that answer (tests/faults/timeline.py). While a gateway searches for a pair of ranks, the
time counts for the state of the gangs, as their controller knows it.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tests.faults.timeline import ATTEMPT, ENDED, GRANTED, PIECE, ROUTING

SHARE = 0.1
LATE, DETECTION, GATEWAY = "messages came late", "until the loss was noticed", "gateway was gone"
PAUSE, NO_PAIR, QUEUE, READ = "pauses", "no pair of ranks", "waiting for a row", "reading again"
UNKNOWN, LEAVING, STARTING = (
    "no pair, loss not known",
    "no pair, ranks leave",
    "no pair, ranks start",
)
WARMING = "no pair, warm-up"
AFTER = {ENDED: PAUSE, ROUTING: NO_PAIR, ATTEMPT: QUEUE, GRANTED: READ}
COMPARED_PAIRS = "ready", "starting", "lost"
"""States of a gang, starting with the one in which it may serve."""
OF_STATE = {"starting": STARTING, "lost": LEAVING}
Event = dict[str, Any]


def parts_of_longest(
    told: Sequence[Event], events: Sequence[Event], gangs: Sequence[Event]
) -> dict[str, str]:
    """Return mean seconds and share of each part, over the longest tenth of all gaps."""
    by_request: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda one: one["at"]):
        by_request.setdefault(event["request"], []).append(event)
    gaps = sorted((one for one in told if one["gap_s"]), key=lambda one: -one["gap_s"])
    longest = gaps[: max(1, int(SHARE * len(gaps)))]
    spent_s: defaultdict[str, float] = defaultdict(float)
    for one in longest:
        noted = by_request.get(one["request_id"], [])
        ends = one["gap_at"] + one["gap_s"]
        for part, seconds in parts(noted, gangs, one["gap_at"], ends).items():
            spent_s[part] += seconds
    whole_s = sum(spent_s.values()) or 1.0
    return {
        part: f"{seconds / len(longest):.1f} s, {100 * seconds / whole_s:.0f} %"
        for part, seconds in sorted(spent_s.items(), key=lambda one: -one[1])
    }


def parts(
    events: Sequence[Event], gangs: Sequence[Event], begins: float, ends: float
) -> dict[str, float]:
    """Return the seconds of each part between two moments of an answer with these events."""
    found: defaultdict[str, float] = defaultdict(float)
    within = [one for one in events if begins < one["at"] <= ends]
    before = next((one for one in reversed(events) if one["at"] <= begins), {"event": PIECE})
    moments = [begins, *(one["at"] for one in within), ends]
    for i, last in enumerate([before, *within]):
        following = within[i] if i < len(within) else None
        part = _part(last, following)
        if part != NO_PAIR:
            found[part] += moments[i + 1] - moments[i]
            continue
        for waited, seconds in _without_pair(gangs, moments[i], moments[i + 1]).items():
            found[waited] += seconds
    return dict(found)


def _without_pair(gangs: Sequence[Event], begins: float, ends: float) -> dict[str, float]:
    """Return the seconds spent for each reason why a gateway has no pair of ranks."""
    found: defaultdict[str, float] = defaultdict(float)
    changes = sorted({begins, *(one["at"] for one in gangs if begins < one["at"] < ends)})
    for moment, later in pairwise([*changes, ends]):
        state = _state_at(gangs, moment)
        if state in OF_STATE:
            found[OF_STATE[state]] += later - moment
            continue
        is_lost_later = any(moment < one["at"] <= ends and one["state"] == "lost" for one in gangs)
        found[UNKNOWN if is_lost_later else WARMING] += later - moment
    return dict(found)


def _state_at(gangs: Sequence[Event], moment: float) -> str:
    """Return the state of the worse of the two kinds; a kind has the state of its best gang."""
    states: dict[str, str] = {}
    for one in gangs:
        if one["at"] <= moment:
            states[one["gang"]] = one["state"]
    kinds: dict[str, list[int]] = {}
    for gang, state in states.items():
        place = COMPARED_PAIRS.index(state) if state in COMPARED_PAIRS else 0
        kinds.setdefault(gang.partition("-")[0], []).append(place)
    return COMPARED_PAIRS[max((min(places) for places in kinds.values()), default=0)]


def _part(last: Event, following: Event | None) -> str:
    """Return the part that the time from ``last`` to ``following`` counts for. ``following`` is
    None if a piece ended the gap."""
    if following is not None and following.get("pid") != last.get("pid", following.get("pid")):
        return GATEWAY
    if last["event"] == PIECE:
        return DETECTION if following is not None else LATE
    if following is not None and following["event"] == ENDED:
        return DETECTION
    return AFTER[last["event"]]
