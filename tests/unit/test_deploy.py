"""Properties of deploy/ that no schema checks.

Pods hold their gangs exactly. Names, ports, paths and versions agree between the manifests, the
config and the image. Each check is also shown to fail.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.control.plan import REPLICA_LABEL, plan_gangs
from tandem.core.config import TINY_MODEL
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
from tests.kubelet import environment
from tests.kustomize import patch, render

OVERLAYS = ("base", "overlays/cpu", "overlays/gpu8", "overlays/hosts2")
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]


def pods_hold_their_gangs(it: Deployed) -> None:
    """Check that a replica of a group holds a gang of each kind that names the group, and no
    more."""
    plans = plan_gangs(it.config)
    assert {plan.group for plan in plans} == it.groups.keys()
    for name, group in it.groups.items():
        gangs = [plan for plan in plans if plan.group == name]
        num = Counter(plan.kind for plan in gangs)
        assert set(num.values()) == {group["replicas"]}
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        own = ranks_per_pod(group, gangs[0].resources)
        assert all(plan.resources == gangs[0].resources for plan in gangs)
        num_ranks = sum(plan.num_ranks for plan in gangs)
        assert own * group["numOfHosts"] * group["replicas"] == num_ranks
        assert ray_resources(group)["GPU"] == own * gangs[0].resources.get("GPU", 0)


def gangs_lie_in_one_replica(it: Deployed) -> None:
    """Check that each gang lies in one replica, whose pods the operator replaces together. It
    labels only the pods of multi-host groups."""
    for group in it.groups.values():
        given = {one["name"]: one for one in env(group)}
        if group["numOfHosts"] == 1:
            assert "RAY_OVERRIDE_LABELS" not in given
            continue
        labels = json.loads(given["RAY_OVERRIDE_LABELS"]["value"])
        assert labels == {REPLICA_LABEL: "$(REPLICA)"} and [*given].index("REPLICA") < [
            *given
        ].index("RAY_OVERRIDE_LABELS")
        path = given["REPLICA"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == "metadata.labels['ray.io/worker-group-replica-name']"


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
    """Check that a gateway's grace period covers its drain, and that its successor is ready
    first."""
    server = it.config.server
    pause = container(it.gateway_pod)["lifecycle"]["preStop"]["exec"]["command"]
    most = float(pause[1]) + server.lame_duck_s + server.drain_timeout_s + 20
    assert it.gateway_pod["terminationGracePeriodSeconds"] >= most and pause[0] == "sleep"
    assert it.gateway["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    probe = container(it.gateway_pod)["readinessProbe"]
    assert server.lame_duck_s > probe["periodSeconds"] * probe["failureThreshold"]


def workers_may_drain(it: Deployed) -> None:
    """Check that the pods' grace period covers draining the answers and stopping the ranks."""
    control = it.config.control
    for group in it.groups.values():
        [timeout_s] = [float(one["value"]) for one in env(group) if "DRAIN_TIMEOUT" in one["name"]]
        assert timeout_s >= control.drain_timeout_s + control.stop_timeout_s
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= timeout_s + 20
    [head_s] = [
        one["value"] for one in env(it.cluster["spec"]["headGroupSpec"]) if "DRAIN" in one["name"]
    ]
    assert head_s == "0", "the controller stays there to its end"


def env(group: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = container(group["template"]["spec"])["env"]
    return found


def probes_ask_what_answers(it: Deployed) -> None:
    """Check the probes' paths and ports. Liveness must not depend on gangs, or a gateway would be
    killed while a gang is away."""
    box = container(it.gateway_pod)
    ports = {p["name"]: p["containerPort"] for p in box["ports"]}
    assert it.config.server.http_address == f"0.0.0.0:{ports['http']}"
    asked = {kind: box[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {one["port"] for one in asked.values()} == {"http"}
    told = [one["path"] for one in asked.values()]
    assert told == ["/livez", "/livez", "/readyz"]


def pods_are_restricted(it: Deployed) -> None:
    """Check that pods meet the "restricted" Pod Security standard and can write where they need
    to."""
    fetch = [m for m in render(DEPLOY / "checkpoint") if m["kind"] == "Job"][0]
    for pod in (*it.pods, fetch["spec"]["template"]["spec"]):
        assert pod["automountServiceAccountToken"] is False
        own = pod["securityContext"]
        assert (own["runAsNonRoot"], own["runAsUser"], own["fsGroup"]) == (True, 1000, 1000)
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}
        box = container(pod)["securityContext"]
        assert box["allowPrivilegeEscalation"] is False and box["readOnlyRootFilesystem"] is True
        has_rdma = "rdma/hca" in container(pod)["resources"]["limits"]
        assert box["capabilities"] == {"drop": ["ALL"]} | (
            {"add": ["IPC_LOCK"]} if has_rdma else {}
        )
        written = {m["mountPath"] for m in mounts(pod) if "emptyDir" in volumes(pod)[m["name"]]}
        assert {"/tmp", "/home/tandem/.cache"} <= written


def loopback_needs_no_proxy(it: Deployed) -> None:
    """Check no_proxy: a policy may give every pod an http_proxy, which wget would use for
    localhost."""
    for pod in it.pods:
        [value] = [one["value"] for one in container(pod)["env"] if one["name"] == "no_proxy"]
        assert {"localhost", "127.0.0.1"} <= {*value.split(",")}


def ray_wants_its_token(it: Deployed) -> None:
    """Check that gateways read the token that the operator keeps in a Secret of the cluster's
    name."""
    assert it.cluster["spec"]["authOptions"] == {"mode": "token"}
    given = {one["name"]: one for one in container(it.gateway_pod)["env"]}
    assert given["RAY_AUTH_MODE"]["value"] == "token"
    secret = given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": it.cluster["metadata"]["name"], "key": "auth_token"}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return bool(selector["matchLabels"].items() <= labels.items())


def others_reach_what_is_told(it: Deployed) -> None:
    """Check that only the gateway's gRPC port is open to all sources, and that every port named by
    a policy exists."""
    pods = [*zip(it.pods, it.labels(), strict=True)]
    within, clients, monitoring = it.policies
    own = within["spec"]["podSelector"]
    assert all(selects(own, labels) for _, labels in pods)
    assert within["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]
    open_to_all = [
        (labels["app.kubernetes.io/name"], port["port"])
        for policy in it.policies
        for rule in policy["spec"]["ingress"]
        if "from" not in rule
        for _, labels in pods
        if selects(policy["spec"]["podSelector"], labels)
        for port in rule["ports"]
    ]
    assert open_to_all == [("tandem-gateway", "grpc")]
    named = {
        port["port"]
        for p in (clients, monitoring)
        for r in p["spec"]["ingress"]
        for port in r["ports"]
    }
    assert named <= {port["name"] for pod, _ in pods for port in container(pod)["ports"]}


def evictions_are_few(it: Deployed) -> None:
    """Check that evictions take one pod of each kind at a time, and never a head without fault
    tolerance."""
    for pod_labels in it.labels():
        [budget] = [
            one["spec"] for one in it.budgets if selects(one["spec"]["selector"], pod_labels)
        ]
        is_head = pod_labels.get("ray.io/node-type") == "head"
        assert budget["maxUnavailable"] == (0 if is_head else 1)


def mounts_have_volumes(it: Deployed) -> None:
    for pod in (*it.ray_pods, it.gateway_pod):
        assert {mount["name"] for mount in mounts(pod)} == volumes(pod).keys()


def object_stores_fit_shared_memory(it: Deployed) -> None:
    """Check object stores in pods with their own /dev/shm: if one does not fit, Ray silently uses a
    disk."""
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
    """Check that ranks and gateways read the checkpoint from the volume that deploy/checkpoint
    fills."""
    path = it.config.model.path
    if path == TINY_MODEL:
        return
    made = [render(folder) for folder in DEPLOY.glob("checkpoint*")]
    kinds = [{manifest["kind"]: manifest for manifest in one} for one in made]
    [by_kind] = [one for one in kinds if f"--local-dir={path}" in fetched(one)["args"]]
    fetch = by_kind["Job"]["spec"]["template"]["spec"]
    assert container(fetch)["command"][2].rpartition("/")[2] == path.name
    for pod in (fetch, it.gateway_pod, *it.ray_pods[1:]):
        [mount] = [m for m in mounts(pod) if Path(m["mountPath"]) in path.parents]
        claim = volumes(pod)[mount["name"]]["persistentVolumeClaim"]["claimName"]
        assert claim == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
        assert pod is fetch or mount["readOnly"]


def fetched(by_kind: dict[str, Any]) -> dict[str, Any]:
    return container(by_kind["Job"]["spec"]["template"]["spec"])


CHECKS = (
    pods_hold_their_gangs,
    gangs_lie_in_one_replica,
    head_takes_no_rank,
    requests_are_limits,
    all_run_one_image,
    gateway_finds_the_head,
    service_reaches_gateways,
    gateways_may_drain,
    workers_may_drain,
    probes_ask_what_answers,
    pods_are_restricted,
    loopback_needs_no_proxy,
    ray_wants_its_token,
    others_reach_what_is_told,
    evictions_are_few,
    mounts_have_volumes,
    object_stores_fit_shared_memory,
    checkpoint_is_where_it_is_read,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("folder", OVERLAYS)
def test_overlays_fit_together(folder: str, check: Callable[[Deployed], None]) -> None:
    check(deployed(folder))


@pytest.mark.skipif(shutil.which("wget") is None, reason="needs wget, as the image has it")
def test_the_operators_probe_passes_by_a_proxy() -> None:
    """Run the operator's probe command with the variables of each pod, and without them."""
    it = deployed("base")
    with socket.create_server(("127.0.0.1", 0)) as asked:
        command = ["wget", "-q", "-T", "5", "--tries", "1", "-O-"]
        command.append(f"http://localhost:{asked.getsockname()[1]}/healthz")

        def probe(given: list[dict[str, Any]]) -> tuple[int, str]:
            own = {one["name"]: one["value"] for one in given if "value" in one}
            env = os.environ | own | {"http_proxy": "http://127.0.0.1:9"}
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
                if given:
                    connection, _ = asked.accept()
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nsuccess")
                    connection.close()
                told, _ = process.communicate(timeout=60)
            return process.returncode, told

        assert probe([])[0] != 0, "no connection comes"
        asked.settimeout(60)
        for pod in it.pods:
            assert probe(container(pod)["env"]) == (0, "success")


GROUP = "/spec/workerGroupSpecs/1"
POD = f"{GROUP}/template/spec"
GATEWAY = "/spec/template/spec"
CONFIG = "model: {path: /models/DeepSeek-V4}\n"
MISTAKES: list[tuple[Callable[[Deployed], None], str, str, Any]] = [
    (pods_hold_their_gangs, "cluster", f"{GROUP}/replicas", 2),
    (pods_hold_their_gangs, "cluster", f"{GROUP}/numOfHosts", 1),
    (gangs_lie_in_one_replica, "cluster", f"{GROUP}/numOfHosts", 1),
    (gangs_lie_in_one_replica, "cluster", f"{POD}/containers/0/env/3/value", '{"replica": ""}'),
    (
        gangs_lie_in_one_replica,
        "cluster",
        f"{POD}/containers/0/env/2/valueFrom/fieldRef/fieldPath",
        "metadata.name",
    ),
    (
        pods_are_restricted,
        "cluster",
        f"{POD}/containers/0/securityContext/capabilities/add",
        ["SYS_ADMIN"],
    ),
    (pods_hold_their_gangs, "cluster", f"{GROUP}/groupName", "decoding"),
    (pods_hold_their_gangs, "cluster", f"{POD}/containers/0/resources/limits/cpu", "31"),
    (pods_hold_their_gangs, "cluster", f"{POD}/containers/0/resources/limits/nvidia.com~1gpu", "4"),
    (head_takes_no_rank, "cluster", "/spec/headGroupSpec/rayStartParams/num-cpus", "1"),
    (requests_are_limits, "cluster", f"{POD}/containers/0/resources/limits/memory", "2Ti"),
    (all_run_one_image, "cluster", f"{POD}/containers/0/image", "tandem:0.0.9-cuda"),
    (gateway_finds_the_head, "cluster", "/metadata/name", "other"),
    (service_reaches_gateways, "service", "/spec/ports/0/port", 50052),
    (service_reaches_gateways, "service", "/spec/selector", {"app": "tandem"}),
    (service_reaches_gateways, "gateway", f"{GATEWAY}/containers/0/ports/0/containerPort", 50052),
    (
        service_reaches_gateways,
        "gateway",
        f"{GATEWAY}/containers/0/args/1",
        "--set=mode=disaggregated",
    ),
    (gateways_may_drain, "gateway", f"{GATEWAY}/terminationGracePeriodSeconds", 30),
    (gateways_may_drain, "gateway", f"{GATEWAY}/containers/0/args/0", "--config=/etc/tandem.yaml"),
    (gateways_may_drain, "config_map", "/metadata/name", "tandem"),
    (gateways_may_drain, "gateway", "/spec/strategy/rollingUpdate/maxUnavailable", 1),
    (gateways_may_drain, "gateway", f"{GATEWAY}/containers/0/readinessProbe/periodSeconds", 10),
    (workers_may_drain, "cluster", f"{POD}/terminationGracePeriodSeconds", 30),
    (workers_may_drain, "cluster", f"{POD}/containers/0/env/0/value", "30"),
    (
        probes_ask_what_answers,
        "gateway",
        f"{GATEWAY}/containers/0/livenessProbe/httpGet/path",
        "/readyz",
    ),
    (probes_ask_what_answers, "gateway", f"{GATEWAY}/containers/0/ports/1/containerPort", 9401),
    (pods_are_restricted, "cluster", f"{POD}/securityContext/runAsNonRoot", False),
    (pods_are_restricted, "gateway", f"{GATEWAY}/automountServiceAccountToken", True),
    (
        pods_are_restricted,
        "cluster",
        f"{POD}/containers/0/securityContext/readOnlyRootFilesystem",
        False,
    ),
    (pods_are_restricted, "gateway", f"{GATEWAY}/containers/0/volumeMounts/2/mountPath", "/t"),
    (loopback_needs_no_proxy, "cluster", f"{POD}/containers/0/env/1/value", "127.0.0.1"),
    (ray_wants_its_token, "cluster", "/spec/authOptions/mode", "disabled"),
    (ray_wants_its_token, "cluster", "/metadata/name", "other"),
    (others_reach_what_is_told, "gateway", f"{GATEWAY}/containers/0/ports/0/name", "rpc"),
    (others_reach_what_is_told, "cluster", "/spec/headGroupSpec/template/metadata/labels", {}),
    (evictions_are_few, "cluster", "/metadata/name", "other"),
    (gateways_may_drain, "config_map", "/data/tandem.yaml", "prefil: {dp_size: 4}"),
    (mounts_have_volumes, "cluster", f"{POD}/volumes/0/name", "models"),
    (object_stores_fit_shared_memory, "cluster", f"{POD}/volumes/3/emptyDir/sizeLimit", "64Mi"),
    (
        checkpoint_is_where_it_is_read,
        "cluster",
        f"{POD}/containers/0/volumeMounts/2/mountPath",
        "/m",
    ),
    (checkpoint_is_where_it_is_read, "config_map", "/data/tandem.yaml", CONFIG),
]


@pytest.mark.parametrize("check, part, path, value", MISTAKES)
def test_what_does_not_fit_fails(
    check: Callable[[Deployed], None], part: str, path: str, value: Any
) -> None:
    it = deployed("overlays/hosts2")
    check(it)
    patch(getattr(it, part), [{"op": "replace", "path": path, "value": value}])
    with pytest.raises((AssertionError, ValueError)):
        check(it)


def test_who_needs_the_head_waits_for_one_that_comes_back() -> None:
    """Ray ends a process that has not reached the head for a minute, unless it is configured
    otherwise."""
    it, key = deployed("base", "gcs-ft"), "RAY_gcs_rpc_server_reconnect_timeout_s"
    head, *others = it.pods
    told = [environment(it, pod, {"ray.io/group": ""}).get(key) for pod in others]
    assert len(told) == 3 and {*told} == {"600"}
    assert environment(it, head)["RAY_gcs_storage"] == "rocksdb"
