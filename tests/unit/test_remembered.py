"""ExpiringMap drops entries after their time, keeps all others, and compares no other keys."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.expiring_map import ExpiringMap

KEEP_S = 10.0
Event = tuple[float, int]


@given(st.lists(st.tuples(st.floats(0, 7), st.integers(0, 5)), max_size=60))
def test_a_value_is_kept_for_its_time_and_no_longer(events: list[Event]) -> None:
    now = 0.0
    remembered = ExpiringMap[int, float](KEEP_S, lambda: now)
    came: dict[int, float] = {}
    for pause_s, key in events:
        now += pause_s
        remembered.sweep()
        came = {key: at for key, at in came.items() if now - at <= KEEP_S}
        remembered.add(key, now)
        came.setdefault(key, now)
        assert len(remembered) == len(came)
        assert all(key in remembered and remembered[key] == at for key, at in came.items())


class Counted:
    """A key that counts how often it is compared or hashed."""

    num_looked_at = 0

    def __hash__(self) -> int:
        Counted.num_looked_at += 1
        return id(self)


def test_a_sweep_costs_what_it_forgets() -> None:
    now = 0.0
    remembered = ExpiringMap[Counted, None](KEEP_S, lambda: now)
    for _ in range(1000):
        now += 0.01
        remembered.add(Counted(), None)
    Counted.num_looked_at = 0
    remembered.sweep()
    assert Counted.num_looked_at < 5
    now += KEEP_S + 0.001
    remembered.sweep()
    assert len(remembered) == 0
