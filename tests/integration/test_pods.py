"""The manifests at work: the command of each pod in namespaces of its own, up to tokens."""

import os
import re
import signal
import subprocess

import pytest

from benchmarks.driven.procs import alive, wait_gone
from tests.deployed import Deployed, container, deployed, ranks_per_pod
from tests.kustomize import Manifest
from tests.pods import CAN_RUN, Pod, environment, gateway_command, pods, ray_command
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_RUN, reason="needs root and iproute2"),
]
GENERATE = ("tandem", "generate", "def fibonacci(n):", "--max-tokens=16", "--address=tandem:50051")
ASK = """
from tandem import Client
with Client("tandem:50051") as client:
    print(client.complete("def f(", max_tokens=4000, ignore_eos=True).token_ids)
"""
LONG = "python", "-c", ASK
SHM_OF_RAY = "1g"
"""The operator gives every pod of Ray a /dev/shm as large as its memory."""


OVERLAYS = ["base", "overlays/cpu"]


def begin_gateway(pod: Pod, it: Deployed) -> "subprocess.Popen[str]":
    command, env, shm = gateway_command(it)
    for name, text in it.config_map["data"].items():
        (pod.home / "etc" / name).write_text(text)
    process = pod.run(command, shm=shm, env=env)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready grpc="):
            return process
    raise AssertionError(pod.log())


def begin_ray(pod: Pod, it: Deployed, group: Manifest, replica: str = "") -> None:
    """``replica``: of several pods, as the operator labels them."""
    box = container(group["template"]["spec"])
    labels = {"ray.io/group": group.get("groupName", "headgroup")}
    if replica:
        labels["ray.io/worker-group-replica-name"] = replica
    pod.run(ray_command(it, group), shm=SHM_OF_RAY, env=environment(box, labels))


def generated(client: Pod) -> str:
    process = client.run(GENERATE)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, client.log()
    return text


def told(pod: Pod, name: str) -> float:
    """Of the gateway's figures, as Prometheus reads them from that pod."""
    read = "from urllib.request import urlopen; print(urlopen('http://tandem:9400/metrics').read())"
    text, _ = pod.run(("python", "-c", read)).communicate(timeout=60)
    [value] = re.findall(rf"\\n{name} (\S+?)\\n", text)
    return float(value)


def ranks_in(pod: Pod) -> list[str]:
    kinds = {"prefill": "ray::PrefillActor", "decode": "ray::DecodeActor"}
    return [kind for kind, title in kinds.items() for _ in pod.pids(title)]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_from_nothing_to_tokens(folder: str) -> None:
    it = deployed(folder)
    hosts = {f"{it.cluster['metadata']['name']}-head-svc": "head", "tandem": "gateway"}
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

        os.kill(there["gateway"].init(), signal.SIGTERM)
        assert gateway.wait(75) == 0
        gateway = begin_gateway(there["gateway"], it)
        assert generated(there["client"]) == text
        assert [ranks_in(there[name]) for name in machines] == placed

        [raylet] = there["gateway"].pids("/raylet/raylet\0")
        os.kill(raylet, signal.SIGKILL)
        wait_gone({gateway.pid}, timeout_s=60)
        assert not alive(raylet)


def test_a_pod_that_is_deleted_takes_nothing_along() -> None:
    """Its gang goes elsewhere before its node does, which does not wait for its time to be over."""
    it = deployed("base")
    hosts = {f"{it.cluster['metadata']['name']}-head-svc": "head", "tandem": "gateway"}
    machines = ["prefill-0", "decode-0", "spare"]
    with pods(["head", "gateway", "client", *machines], hosts) as there:
        begin_ray(there["head"], it, it.cluster["spec"]["headGroupSpec"])
        for name in machines:
            begin_ray(
                there[name], it, it.groups[name.removesuffix("-0").replace("spare", "decode")]
            )
        begin_gateway(there["gateway"], it)
        expected, _ = there["client"].run(LONG).communicate(timeout=120)
        assert expected, there["client"].log()

        [going] = [there[name] for name in machines if "decode" in ranks_in(there[name])]
        running = there["client"].run(LONG)
        wait_until(lambda: told(there["head"], "tandem_num_requests_running") == 1)
        os.kill(going.init(), signal.SIGTERM)
        text, _ = running.communicate(timeout=120)
        assert (running.returncode, text) == (0, expected), there["client"].log()
        going.processes[-1].wait(60)
        assert "did not finish draining" not in going.log()
        assert generated(there["client"])
        held = [
            kind for name in machines if there[name] is not going for kind in ranks_in(there[name])
        ]
        assert sorted(held) == ["decode", "prefill"]


SIZES = """
prefill: {group: prefill, dp_size: 2}
decode: {group: decode, dp_size: 4}
"""


def test_groups_of_different_sizes() -> None:
    """Prefill of 2 ranks in a pod beside decode of 4 in two, each where it belongs; a gang lies in
    one replica; that one group is gone for a while is nothing to the processes of the other."""
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
    hosts = {f"{it.cluster['metadata']['name']}-head-svc": "head", "tandem": "gateway"}
    # Of replica "a" only one pod has come, "b" is whole: the gang would fit on pods of both.
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
        os.kill(there["prefill-0"].init(), signal.SIGTERM)
        there["prefill-0"].processes[-1].wait(75)
        wait_until(lambda: told(there["head"], "tandem_serving") == 0)
        begin_ray(there["prefill-1"], it, it.groups["prefill"])
        wait_until(lambda: told(there["head"], "tandem_serving") == 1)
        assert generated(there["client"]) == text
        assert ranks_in(there["prefill-1"]) == ["prefill"] * 2
        assert [there[name].pids("ray::DecodeActor") for name in machines] == before
