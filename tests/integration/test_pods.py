"""The manifests of deploy/ in action: each pod's command in separate namespaces, up to tokens."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.harness.procs import alive, wait_gone
from tests.deployed import Deployed, container, deployed, ranks_per_pod
from tests.kubelet import begin_gateway, begin_ray, generated, hosts_of, ranks_in, told
from tests.kustomize import Manifest
from tests.pods import CAN_RUN, Pod, pods
from tests.policies import Peer, enforce
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_RUN, reason="needs root and iproute2"),
]
ASK = """
from tandem import Client
with Client("tandem:50051") as client:
    print(client.complete("def f(", max_tokens=4000, ignore_eos=True).token_ids)
"""
LONG = "python", "-c", ASK
OVERLAYS = ["base", "overlays/cpu"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_from_nothing_to_tokens(folder: str) -> None:
    it = deployed(folder)
    hosts = hosts_of(it)
    machines = [
        f"{group['groupName']}-{index}"
        for group in it.groups.values()
        for index in range(group["replicas"] * group["numOfHosts"])
    ]
    with pods(["head", "gateway", "client", *machines], hosts) as there:
        begin_ray(there["head"], it, it.cluster["spec"]["headGroupSpec"])
        for name in machines:
            begin_ray(there[name], it, it.groups[name.rpartition("-")[0]])
        gateway = begin_gateway(there["gateway"], it)
        text = generated(there["client"])
        assert text
        placed = [ranks_in(there[name]) for name in machines]
        sizes = {k: ranks_per_pod(group, {"CPU": 1}) for k, group in it.groups.items()}
        assert placed == [[kind] * sizes[kind] for kind in sizes]
        assert ranks_in(there["head"]) == ranks_in(there["gateway"]) == []

        there["gateway"].terminate()
        assert gateway.wait(75) == 0
        gateway = begin_gateway(there["gateway"], it)
        assert generated(there["client"]) == text
        assert [ranks_in(there[name]) for name in machines] == placed

        [raylet] = there["gateway"].pids("/raylet/raylet\0")
        os.kill(raylet, signal.SIGKILL)
        wait_gone({gateway.pid}, timeout_s=60)
        assert not alive(raylet)


MACHINES = {"prefill-0": "prefill", "decode-0": "decode", "spare": "decode"}


@contextmanager
def and_a_spare(it: Deployed) -> Iterator[tuple[dict[str, Pod], str]]:
    """Start one machine more than the ranks need; yield the output of LONG, too."""
    with pods(["head", "gateway", "client", *MACHINES], hosts_of(it)) as there:
        begin_ray(there["head"], it, it.cluster["spec"]["headGroupSpec"])
        for name, group in MACHINES.items():
            begin_ray(there[name], it, it.groups[group])
        begin_gateway(there["gateway"], it)
        expected, _ = there["client"].run(LONG).communicate(timeout=120)
        assert expected, there["client"].log()
        yield there, expected


def test_a_pod_that_is_deleted_takes_nothing_along() -> None:
    """The pod's gang migrates before the pod ends, and the pod does not wait for its grace
    period."""
    it = deployed("base")
    with and_a_spare(it) as (there, expected):
        [going] = [there[name] for name in MACHINES if "decode" in ranks_in(there[name])]
        running = there["client"].run(LONG)
        wait_until(lambda: told(there["head"], "tandem_num_requests_running") == 1)
        going.terminate()
        text, _ = running.communicate(timeout=120)
        assert (running.returncode, text) == (0, expected), there["client"].log()
        going.processes[-1].wait(60)
        assert "did not finish draining" not in going.log()
        assert generated(there["client"])
        held = [
            kind for name in MACHINES if there[name] is not going for kind in ranks_in(there[name])
        ]
        assert sorted(held) == ["decode", "prefill"]


def test_a_head_comes_back_to_what_ran() -> None:
    """Running and new answers finish without a head, and no rank ends. Recovery continues when it
    is back."""
    it = deployed("base", "gcs-ft")
    with and_a_spare(it) as (there, expected):
        before = [there[name].pids("ray::") for name in MACHINES]

        running = there["client"].run(LONG)
        wait_until(lambda: told(there["client"], "tandem_num_requests_running") == 1)
        there["head"].end()
        text, _ = running.communicate(timeout=120)
        assert (running.returncode, text) == (0, expected), there["client"].log()
        begun, _ = there["client"].run(LONG).communicate(timeout=120)
        assert begun == expected, there["client"].log()
        begin_ray(there["head"], it, it.cluster["spec"]["headGroupSpec"])
        assert [there[name].pids("ray::") for name in MACHINES] == before

        [going] = [there[name] for name in MACHINES if "decode" in ranks_in(there[name])]
        going.terminate()
        going.processes[-1].wait(75)
        wait_until(lambda: told(there["client"], "tandem_serving") == 1)
        assert there["client"].run(LONG).communicate(timeout=120)[0] == expected


SIZES = """
prefill: {node_group: prefill, dp_size: 2}
decode: {node_group: decode, dp_size: 4}
"""


def test_groups_of_different_sizes() -> None:
    """Prefill has 2 ranks in a pod, decode has 4 ranks in two pods.

    Each rank runs in its group, and a gang lies in one replica. While one group is gone, the
    processes of the other keep running.
    """
    it = deployed("overlays/cpu")
    it.config_map["data"]["tandem.yaml"] = SIZES
    replica = [
        one
        for one in container(deployed("overlays/hosts2").groups["decode"]["template"]["spec"])[
            "env"
        ]
        if "REPLICA" in one["name"] or "LABELS" in one["name"]
    ]
    container(it.groups["decode"]["template"]["spec"])["env"] += replica
    it.groups["decode"]["numOfHosts"] = 2
    hosts = hosts_of(it)
    # Only one pod of replica "a" exists, "b" is complete. The gang would fit on pods of both.
    machines = {"prefill-0": "", "decode-0": "a", "decode-1": "b", "decode-2": "b"}
    later = ["prefill-1"]
    with pods(["head", "gateway", "client", *machines, *later], hosts) as there:
        begin_ray(there["head"], it, it.cluster["spec"]["headGroupSpec"])
        for name, replica in machines.items():
            begin_ray(there[name], it, it.groups[name.rpartition("-")[0]], replica)
        begin_gateway(there["gateway"], it)
        text = generated(there["client"])
        placed = [ranks_in(there[name]) for name in machines]
        assert placed == [["prefill"] * 2, [], ["decode"] * 2, ["decode"] * 2]

        before = [there[name].pids("ray::DecodeActor") for name in machines]
        there["prefill-0"].terminate()
        there["prefill-0"].processes[-1].wait(75)
        wait_until(lambda: told(there["head"], "tandem_serving") == 0)
        begin_ray(there["prefill-1"], it, it.groups["prefill"])
        wait_until(lambda: told(there["head"], "tandem_serving") == 1)
        assert generated(there["client"]) == text
        assert ranks_in(there["prefill-1"]) == ["prefill"] * 2
        assert [there[name].pids("ray::DecodeActor") for name in machines] == before


AGENT = "python", "-m", "http.server", "8080"
"""Stands for the metrics port of Ray's agent, which the test environment lacks."""


@pytest.mark.skipif(
    not shutil.which("nmap") or not shutil.which("nft"), reason="needs nmap and nft"
)
def test_who_reaches_what() -> None:
    """Scan all ports with and without the policies.

    With them, a stranger reaches only gRPC, and the monitor also metrics. Pods of the cluster reach
    each other. Without them, a stranger finds all ports.
    """
    it = deployed("base")
    hosts = hosts_of(it)
    ours = "head", "prefill", "decode", "gateway"
    with pods([*ours, "stranger", "monitor"], hosts) as there:
        begin_ray(there["head"], it, it.cluster["spec"]["headGroupSpec"])
        for name in ("prefill", "decode"):
            begin_ray(there[name], it, it.groups[name])
        begin_gateway(there["gateway"], it)
        for name in ours[:3]:
            there[name].run(AGENT)
        peers = [
            Peer(there[name], labels, ports=_ports(pod))
            for name, labels, pod in zip(ours, it.labels(), it.pods, strict=True)
        ]
        spaces = {"stranger": "other", "monitor": "monitoring"}
        outside = [Peer(there[name], namespace=space) for name, space in spaces.items()]
        targets = [there[name] for name in ours]
        grpc, http = peers[3].ports["grpc"], peers[3].ports["http"]

        open_to_all = scan(there["stranger"], targets)
        assert all(len(ports) > 3 for ports in open_to_all) and http in open_to_all[3]
        enforce(there["head"].switch, it.policies, [*peers, *outside])
        left = scan(there["stranger"], targets)
        assert left == [set(), set(), set(), {grpc}]
        seen = scan(there["monitor"], targets)
        assert seen == [{8080}, {8080}, {8080}, {grpc, http}]
        within = scan(there["prefill"], [there["head"], there["gateway"]])
        assert within[0] >= {6379, 8080} and within[1] >= {grpc, http}
        assert generated(there["stranger"])


def _ports(pod: Manifest) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in container(pod)["ports"]}


def scan(source: Pod, targets: list[Pod]) -> list[set[int]]:
    """Return the open TCP ports of each target, out of all ports."""
    addresses = [pod.address for pod in targets]
    how = "-n", "-Pn", "-sS", "-p-", "--open", "--min-rate=20000", "--max-retries=1", "-oG", "-"
    text, _ = source.run(("nmap", *how, *addresses)).communicate(timeout=300)
    lines = {line.split()[1]: line for line in text.splitlines() if "Ports:" in line}
    return [
        {int(port) for port in re.findall(r"(\d+)/open/tcp", lines.get(address, ""))}
        for address in addresses
    ]
