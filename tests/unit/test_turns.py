"""Turns of waiting requests: resumed answers go first, and a new request waits for a bounded number
of them."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.identity import Identity
from tandem.core.turns import NEW_REQUEST_SHARE, TurnQueue, is_new_turn

ARRIVALS = {"begun": True, "fresh": False}


@given(st.integers(0, 100), st.booleans(), st.booleans())
def test_a_kind_that_waits_alone_has_every_turn(num: int, has_begun: bool, has_fresh: bool) -> None:
    if has_begun and has_fresh:
        assert is_new_turn(num, has_begun, has_fresh) == (num + 1 >= NEW_REQUEST_SHARE)
    else:
        assert is_new_turn(num, has_begun, has_fresh) == has_fresh


@given(st.lists(st.sampled_from(["begun", "fresh", "turn", "leave"]), max_size=80))
def test_each_kind_is_served_in_order_and_neither_starves(events: list[str]) -> None:
    queue = TurnQueue[str]()
    waiting: dict[str, list[Identity]] = {"begun": [], "fresh": []}
    turns_that_passed = {"begun": 0, "fresh": 0}
    """Turns of the other kind, since the first request of this kind last had its turn."""
    for event in [*events, *["turn"] * len(events)]:
        if event in ARRIVALS:
            identity = Identity(event)
            queue.add(identity, event, ARRIVALS[event])
            waiting[event].append(identity)
        elif event == "leave" and len(queue):
            identity = [*queue.resumed, *queue.new][-1]
            queue.discard(identity)
            waiting[identity.request_id].remove(identity)
        elif event == "turn" and (first := queue.peek()):
            identity, kind = first
            queue.pop()
            assert identity == waiting[kind].pop(0), "it has passed one of its own kind"
            [other] = waiting.keys() - {kind}
            turns_that_passed[kind] = 0
            turns_that_passed[other] += bool(waiting[other])
        for kind in waiting:
            if not waiting[kind]:
                turns_that_passed[kind] = 0
        assert turns_that_passed["fresh"] < NEW_REQUEST_SHARE, "a fresh request starves"
        assert turns_that_passed["begun"] <= 1, "fresh requests go first"
        assert len(queue) == sum(map(len, waiting.values()))
        assert [*queue.new] == waiting["fresh"]
    assert not len(queue) and queue.peek() is None


def test_an_identity_that_does_not_wait_is_discarded_in_vain() -> None:
    queue = TurnQueue[int]()
    queue.add(Identity("a"), 1, is_resumed=True)
    queue.discard(Identity("a"))
    assert len(queue) == 1, "the other attempt waits on"
