"""Where nodes listen when nobody said so: on the loopback of one machine, or where Ray put them."""

from cluster.control.plan import hosts_of
from core.config import load


def found(addresses: dict[str, str], *sets: str) -> list[str]:
    machines = sorted(addresses)
    placed_on = [machines[i % len(machines)] for i in range(3)]
    return hosts_of(load(None, list(sets)).kv_transfer.host, placed_on, addresses)


def test_one_machine_keeps_to_itself() -> None:
    assert found({"a": "10.0.0.1"}) == ["127.0.0.1"] * 3


def test_each_of_several_machines_listens_on_its_own_address() -> None:
    assert found({"a": "10.0.0.1", "b": "10.0.0.2"}) == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_a_given_address_is_taken() -> None:
    for addresses in ({"a": "10.0.0.1"}, {"a": "10.0.0.1", "b": "10.0.0.2"}):
        assert found(addresses, "kv_transfer.host=10.9.9.9") == ["10.9.9.9"] * 3
