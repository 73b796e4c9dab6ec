"""Without a configured host, a node listens on the address of the machine where Ray placed it."""

from tandem.cluster.control.plan import host_addresses
from tandem.core.config import load


def found(addresses: dict[str, str], *sets: str) -> list[str]:
    machines = sorted(addresses)
    placed_on = [machines[i % len(machines)] for i in range(3)]
    return host_addresses(load(None, list(sets)).kv_transfer.host, placed_on, addresses)


def test_each_machine_listens_on_its_own_address() -> None:
    """Each machine listens on its own address, even a single one, because another may join."""
    assert found({"a": "127.0.0.1"}) == ["127.0.0.1"] * 3
    assert found({"a": "10.0.0.1"}) == ["10.0.0.1"] * 3
    assert found({"a": "10.0.0.1", "b": "10.0.0.2"}) == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_a_given_address_is_taken() -> None:
    for addresses in ({"a": "10.0.0.1"}, {"a": "10.0.0.1", "b": "10.0.0.2"}):
        assert found(addresses, "kv_transfer.host=10.9.9.9") == ["10.9.9.9"] * 3
