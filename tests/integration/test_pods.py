"""The manifests at work: the command of each pod in namespaces of its own, up to tokens."""

import os
import signal
import subprocess

import pytest

from benchmarks.driven.procs import alive, wait_gone
from tests.deployed import Deployed, deployed, ranks_per_pod
from tests.pods import CAN_RUN, Pod, gateway_command, pods, ray_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_RUN, reason="needs root and iproute2"),
]
GENERATE = ("tandem", "generate", "def fibonacci(n):", "--max-tokens=16", "--address=tandem:50051")
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


def generated(client: Pod) -> str:
    process = client.run(GENERATE)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, client.log()
    return text


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
        there["head"].run(ray_command(it, it.cluster["spec"]["headGroupSpec"]), shm=SHM_OF_RAY)
        for name in machines:
            group = it.groups[name.rpartition("-")[0]]
            there[name].run(ray_command(it, group), shm=SHM_OF_RAY)
        gateway = begin_gateway(there["gateway"], it)
        text = generated(there["client"])
        assert text
        placed = sorted(ranks_in(there[name]) for name in machines)
        sizes = {k: ranks_per_pod(group, {"CPU": 1}) for k, group in it.groups.items()}
        assert placed == sorted([kind] * sizes[kind] for kind in sizes)
        assert ranks_in(there["head"]) == ranks_in(there["gateway"]) == []

        os.kill(there["gateway"].init(), signal.SIGTERM)
        assert gateway.wait(60) == 0
        gateway = begin_gateway(there["gateway"], it)
        assert generated(there["client"]) == text
        assert sorted(ranks_in(there[name]) for name in machines) == placed

        [raylet] = there["gateway"].pids("/raylet/raylet\0")
        os.kill(raylet, signal.SIGKILL)
        wait_gone({gateway.pid}, timeout_s=60)
        assert not alive(raylet)
