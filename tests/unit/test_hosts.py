"""Where nodes listen when nobody said so: on the loopback of one machine, or where Ray put them."""

from cluster.control.hosts import with_hosts
from cluster.control.plan import plan_nodes
from core.config import load


def hosts_of(addresses: dict[str, str], *sets: str) -> list[str]:
    plans = plan_nodes(load(None, ["prefill.replicas=2", *sets]))
    machines = sorted(addresses)
    placed_on = [machines[i % len(machines)] for i in range(len(plans))]
    return [plan.spec.host for plan in with_hosts(plans, placed_on, addresses)]


def test_one_machine_keeps_to_itself() -> None:
    assert hosts_of({"a": "10.0.0.1"}) == ["127.0.0.1"] * 3


def test_each_of_several_machines_listens_on_its_own_address() -> None:
    found = hosts_of({"a": "10.0.0.1", "b": "10.0.0.2"})
    assert found == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_a_given_address_is_taken() -> None:
    plans = plan_nodes(load(None, ["kv_transfer.host=10.9.9.9"]))
    assert {plan.spec.host for plan in plans} == {"10.9.9.9"}
