"""What no schema knows of deploy/: pods hold their gangs exactly; names, ports, paths and versions
of the manifests, the config and the image meet. Each check is also seen to fail."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.control.plan import plan_gangs
from core.config import TINY_MODEL
from tests.deployed import (
    DEPLOY,
    Deployed,
    amount,
    container,
    deployed,
    mounts,
    ranks_per_pod,
    ray_resources,
    volumes,
)
from tests.kustomize import patch, render

OVERLAYS = ("base", "overlays/cpu", "overlays/gpu8")
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]


def pods_hold_their_gangs(it: Deployed) -> None:
    """And no gang fits elsewhere in part: Ray places ranks by what is free, in whichever group."""
    plans = plan_gangs(it.config)
    assert {plan.kind for plan in plans} == it.groups.keys()
    for kind, group in it.groups.items():
        gangs = [plan for plan in plans if plan.kind == kind]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == len(gangs)
        own = ranks_per_pod(group, gangs[0].resources)
        assert own * group["numOfHosts"] == gangs[0].num_ranks
        assert ray_resources(group)["GPU"] == own * gangs[0].resources.get("GPU", 0)
        for other in it.groups.values():
            assert ranks_per_pod(other, gangs[0].resources) in (0, own)


def head_takes_no_rank(it: Deployed) -> None:
    head = it.cluster["spec"]["headGroupSpec"]
    assert ray_resources(head) == {"CPU": 0, "GPU": 0}
    assert it.cluster["spec"]["enableInTreeAutoscaling"] is False


def requests_are_limits(it: Deployed) -> None:
    for pod in (*it.ray_pods, it.gateway_pod):
        resources = container(pod)["resources"]
        assert resources["requests"] == resources["limits"]


def all_run_one_image(it: Deployed) -> None:
    [image] = {container(pod)["image"] for pod in (*it.ray_pods, it.gateway_pod)}
    [device] = {it.config.prefill.device, it.config.decode.device}
    assert image.rpartition(":")[2] == f"{PROJECT['version']}-{device}"


def gateway_finds_the_head(it: Deployed) -> None:
    [port] = [p for p in container(it.ray_pods[0])["ports"] if p["name"] == "gcs-server"]
    [address] = [e["value"] for e in container(it.gateway_pod)["env"] if e["name"] == "RAY_ADDRESS"]
    assert address == f"{it.cluster['metadata']['name']}-head-svc:{port['containerPort']}"


def service_reaches_gateways(it: Deployed) -> None:
    labels = it.gateway["spec"]["template"]["metadata"]["labels"]
    for selector in (it.service["spec"]["selector"], it.gateway["spec"]["selector"]["matchLabels"]):
        assert selector and selector.items() <= labels.items()
    ports = {p["name"]: p["containerPort"] for p in container(it.gateway_pod)["ports"]}
    [port] = it.service["spec"]["ports"]
    assert it.config.server.address == f"0.0.0.0:{ports[port['targetPort']]}"
    assert port["port"] == ports[port["targetPort"]]


def gateways_may_drain(it: Deployed) -> None:
    """Answers, then the raylet."""
    assert it.gateway_pod["terminationGracePeriodSeconds"] >= it.config.server.drain_s + 20


def mounts_have_volumes(it: Deployed) -> None:
    for pod in (*it.ray_pods, it.gateway_pod):
        assert {mount["name"] for mount in mounts(pod)} == volumes(pod).keys()


def object_stores_fit_shared_memory(it: Deployed) -> None:
    """Where a pod brings its own /dev/shm: Ray would use a disk instead, and say so only there."""
    store = max(
        map(int, re.findall(r"--object-store-memory (\d+)", (DEPLOY / "gateway.sh").read_text()))
    )
    for group in (it.cluster["spec"]["headGroupSpec"], *it.groups.values()):
        store = max(store, int(group["rayStartParams"]["object-store-memory"]))
    for pod in (*it.ray_pods, it.gateway_pod):
        for name in (m["name"] for m in mounts(pod) if m["mountPath"] == "/dev/shm"):
            assert volumes(pod)[name]["emptyDir"]["medium"] == "Memory"
            assert amount(volumes(pod)[name]["emptyDir"]["sizeLimit"]) >= store


def checkpoint_is_where_it_is_read(it: Deployed) -> None:
    """By ranks and gateways alike, on the volume that deploy/checkpoint fills."""
    path = it.config.model.path
    if path == TINY_MODEL:
        return
    by_kind = {manifest["kind"]: manifest for manifest in render(DEPLOY / "checkpoint")}
    fetch = by_kind["Job"]["spec"]["template"]["spec"]
    assert f"--local-dir={path}" in container(fetch)["args"]
    for pod in (fetch, it.gateway_pod, *it.ray_pods[1:]):
        [mount] = [m for m in mounts(pod) if Path(m["mountPath"]) in path.parents]
        claim = volumes(pod)[mount["name"]]["persistentVolumeClaim"]["claimName"]
        assert claim == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
        assert pod is fetch or mount["readOnly"]


CHECKS = (
    pods_hold_their_gangs,
    head_takes_no_rank,
    requests_are_limits,
    all_run_one_image,
    gateway_finds_the_head,
    service_reaches_gateways,
    gateways_may_drain,
    mounts_have_volumes,
    object_stores_fit_shared_memory,
    checkpoint_is_where_it_is_read,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("folder", OVERLAYS)
def test_overlays_fit_together(folder: str, check: Callable[[Deployed], None]) -> None:
    check(deployed(folder))


def test_a_gang_of_sixteen_is_two_hosts_of_eight() -> None:
    it = deployed("overlays/gpu8")
    text = it.config_map["data"]["tandem.yaml"]
    it.config_map["data"]["tandem.yaml"] = text.replace("dp_size: 4", "dp_size: 16")
    limits = {"cpu": "32", "memory": "1Ti", "nvidia.com/gpu": "8"}
    for group in it.groups.values():
        group["numOfHosts"] = 2
        container(group["template"]["spec"])["resources"] = {"requests": limits, "limits": limits}
    for check in CHECKS:
        check(it)


GROUP = "/spec/workerGroupSpecs/1"
POD = f"{GROUP}/template/spec"
GATEWAY = "/spec/template/spec"
CONFIG = "model: {path: /models/DeepSeek-V2-Lite}\n"
MISTAKES: list[tuple[Callable[[Deployed], None], str, str, Any]] = [
    (pods_hold_their_gangs, "cluster", f"{GROUP}/replicas", 2),
    (pods_hold_their_gangs, "cluster", f"{GROUP}/numOfHosts", 2),
    (pods_hold_their_gangs, "cluster", f"{GROUP}/groupName", "decoding"),
    (pods_hold_their_gangs, "cluster", f"{POD}/containers/0/resources/limits/cpu", "15"),
    (pods_hold_their_gangs, "cluster", f"{POD}/containers/0/resources/limits/nvidia.com~1gpu", "8"),
    (head_takes_no_rank, "cluster", "/spec/headGroupSpec/rayStartParams/num-cpus", "1"),
    (requests_are_limits, "cluster", f"{POD}/containers/0/resources/limits/memory", "1Ti"),
    (all_run_one_image, "cluster", f"{POD}/containers/0/image", "tandem:0.0.9-cuda"),
    (gateway_finds_the_head, "cluster", "/metadata/name", "other"),
    (service_reaches_gateways, "service", "/spec/ports/0/port", 50052),
    (service_reaches_gateways, "service", "/spec/selector", {"app": "tandem"}),
    (service_reaches_gateways, "gateway", f"{GATEWAY}/containers/0/ports/0/containerPort", 50052),
    (service_reaches_gateways, "gateway", f"{GATEWAY}/containers/0/args/1", "--set=mode=split"),
    (gateways_may_drain, "gateway", f"{GATEWAY}/terminationGracePeriodSeconds", 30),
    (gateways_may_drain, "gateway", f"{GATEWAY}/containers/0/args/0", "--config=/etc/tandem.yaml"),
    (gateways_may_drain, "config_map", "/metadata/name", "tandem"),
    (gateways_may_drain, "config_map", "/data/tandem.yaml", "prefil: {dp_size: 4}"),
    (mounts_have_volumes, "cluster", f"{POD}/volumes/0/name", "models"),
    (object_stores_fit_shared_memory, "cluster", f"{POD}/volumes/1/emptyDir/sizeLimit", "64Mi"),
    (
        checkpoint_is_where_it_is_read,
        "cluster",
        f"{POD}/containers/0/volumeMounts/0/mountPath",
        "/m",
    ),
    (checkpoint_is_where_it_is_read, "config_map", "/data/tandem.yaml", CONFIG.replace("V2", "V3")),
]


@pytest.mark.parametrize("check, part, path, value", MISTAKES)
def test_what_does_not_fit_fails(
    check: Callable[[Deployed], None], part: str, path: str, value: Any
) -> None:
    it = deployed("overlays/gpu8")
    check(it)
    patch(getattr(it, part), [{"op": "replace", "path": path, "value": value}])
    with pytest.raises((AssertionError, ValueError)):
        check(it)
