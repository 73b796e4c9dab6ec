"""Sessions of gateways: a session that is not renewed is dropped exactly once, and no other is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.identity import Identity
from tandem.decode_node.service.sessions import Sessions

LEASE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_a_silent_gateway_holds_is_dropped_and_no_more() -> None:
    clock = Clock()
    sessions = Sessions(LEASE_S, clock)
    a, b, c = (Identity(name) for name in "abc")
    sessions.add(1, a)
    sessions.add(1, b)
    sessions.add(2, c)
    clock.now += LEASE_S - 1
    sessions.renew(2)
    assert sessions.sweep() == []
    clock.now += 1
    assert set(sessions.sweep()) == {a, b}
    assert (
        sessions.sweep() == []
        and sessions.sequences_of(1) == ()
        and sessions.sequences_of(2) == (c,)
    )
    assert sessions.session_of(a) is None and sessions.session_of(c) == 2
    sessions.renew(1)
    assert sessions.sequences_of(1) == (), "a gateway that was stopped too long finds nothing"
    sessions.release(c)
    sessions.release(c)
    assert len(sessions) == 0
    sessions.check_integrity()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("rhlst"), st.integers(1, 3), st.integers(0, 9))))
def test_random_lives(operations: list[tuple[str, int, int]]) -> None:
    """Every sequence leaves exactly once, by a release or by a sweep."""
    clock = Clock()
    sessions = Sessions(LEASE_S, clock)
    held: dict[Identity, tuple[int, float]] = {}
    renewed: dict[int, float] = {}
    for operation, session, number in operations:
        if operation == "t":
            clock.now += number
        elif operation == "r":
            sessions.renew(session)
            renewed[session] = clock.now
        elif operation == "h":
            identity = Identity("r", number)
            sessions.add(session, identity)
            held[identity] = session, clock.now
            renewed[session] = clock.now
        elif operation == "l" and held:
            identity = list(held)[number % len(held)]
            sessions.release(identity)
            del held[identity]
        elif operation == "s":
            late = {s for s, at in renewed.items() if at <= clock.now - LEASE_S}
            expected = {i for i, (s, _) in held.items() if s in late}
            assert set(sessions.sweep()) == expected
            for identity in expected:
                del held[identity]
            for one in late:
                del renewed[one]
        assert len(sessions) == len(held)
        sessions.check_integrity()
