"""Kubernetes and KubeRay accept all of every rendered manifest of deploy/, and wrong fields of any
kind are found. Kustomizations use only what tests/kustomize.py renders as kubectl does."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kustomize import Manifest, patch, render
from tests.manifests import problems

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = ("base", "overlays/cpu", "overlays/gpu8", "overlays/hosts2")
FOLDERS = (*OVERLAYS, "checkpoint", "checkpoint-v3")
COMPONENTS = ("components/gcs-ft", "components/monitoring", "components/any-uid")
FOR_CHECKPOINTS = "components/any-uid-fetch"
USERS = {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"}
"""Fields that OpenShift sets, and rejects if they are outside of the namespace's range."""
POD = "/spec/workerGroupSpecs/0/template/spec"
POD_OF_DEPLOYMENT = "/spec/template/spec"


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    return next(manifest for manifest in manifests if manifest["kind"] == kind)


@pytest.mark.parametrize("folder", FOLDERS)
def test_rendered_manifests_are_right(folder: str) -> None:
    manifests = render(DEPLOY / folder)
    assert manifests
    for manifest in manifests:
        assert problems(manifest) == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_what_is_added_to_an_overlay_fits_all_of_them(component: str) -> None:
    for folder in OVERLAYS:
        manifests = render(DEPLOY / folder, DEPLOY / component)
        assert manifests != render(DEPLOY / folder)
        assert not [problem for manifest in manifests for problem in problems(manifest)]


def test_every_kustomization_is_looked_at() -> None:
    found = {path.parent for path in DEPLOY.rglob("kustomization.yaml")}
    assert found == {DEPLOY / folder for folder in (*FOLDERS, *COMPONENTS, FOR_CHECKPOINTS)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_need_no_user_id_of_their_own(folder: str) -> None:
    is_cluster = folder in OVERLAYS
    component = "components/any-uid" if is_cluster else FOR_CHECKPOINTS
    manifests = render(DEPLOY / folder, DEPLOY / component)
    assert USERS & keys(render(DEPLOY / folder)) and not USERS & keys(manifests)
    assert not [problem for manifest in manifests for problem in problems(manifest)]
    contexts = json.dumps(manifests).count('"runAsNonRoot": true')
    assert contexts == json.dumps(render(DEPLOY / folder)).count('"runAsNonRoot": true') > 0


def keys(node: Any) -> set[str]:
    """Return every key in a tree of dicts and lists."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = set(node) if isinstance(node, dict) else set[str]()
    return own.union(*map(keys, children))


MISTAKES: list[tuple[str, str, str, Any, str]] = [
    ("RayCluster", "add", "/spec/workerGroupSpec", [], "workerGroupSpec"),
    ("RayCluster", "add", f"{POD}/containers/0/imagePulPolicy", "Always", "imagePulPolicy"),
    ("RayCluster", "add", f"{POD}/tolerations/0/efect", "NoSchedule", "efect"),
    ("RayCluster", "add", f"{POD}/volumes/2/persistentVolumeClaim/claim", "x", "claim"),
    ("RayCluster", "add", "/metadata/label", {}, "label"),
    ("RayCluster", "replace", "/metadata/name", "Tandem_1", "Tandem_1"),
    ("RayCluster", "replace", "/spec/workerGroupSpecs/0/numOfHosts", "2", "not of type 'integer'"),
    ("RayCluster", "replace", "/spec/workerGroupSpecs/0/replicas", 1.5, "not of type 'integer'"),
    ("RayCluster", "replace", "/spec/headGroupSpec/rayStartParams/num-cpus", 0, "of type 'string'"),
    ("RayCluster", "replace", f"{POD}/containers/0/resources/limits/cpu", "two", "does not match"),
    ("RayCluster", "replace", f"{POD}/volumes/3/emptyDir/medium", 1, "of type 'string'"),
    ("RayCluster", "remove", "/spec/workerGroupSpecs/0/groupName", None, "'groupName' is a req"),
    ("RayCluster", "remove", "/spec/workerGroupSpecs/0/maxReplicas", None, "'maxReplicas' is a"),
    ("RayCluster", "remove", f"{POD}/containers/0/name", None, "'name' is a required"),
    ("RayCluster", "remove", "/spec/headGroupSpec/template", None, "'template' is a required"),
    ("RayCluster", "replace", f"{POD}/volumes/1/name", "model", "twice"),
    ("RayCluster", "replace", f"{POD}/containers/0/volumeMounts/1/mountPath", "/models", "twice"),
    ("RayCluster", "replace", "/apiVersion", "ray.io/v1alpha1", "is none of"),
    ("Deployment", "add", f"{POD_OF_DEPLOYMENT}/container", [], "container"),
    ("Deployment", "add", f"{POD_OF_DEPLOYMENT}/containers/0/env/0/valu", "x", "valu"),
    (
        "Deployment",
        "replace",
        f"{POD_OF_DEPLOYMENT}/containers/0/ports/0/containerPort",
        "x",
        "int",
    ),
    ("Deployment", "replace", "/spec/replicas", "2", "not of type 'integer'"),
    ("Deployment", "add", "/spec/replica", 2, "replica"),
    ("Deployment", "remove", "/spec/selector", None, "'selector' is a required"),
    ("Service", "add", "/spec/ports/0/targetport", 50051, "targetport"),
    ("Service", "replace", "/spec/ports/0/port", "50051", "not of type 'integer'"),
    ("Service", "replace", "/spec/ports/0/port", 70000, "maximum"),
    (
        "ConfigMap",
        "replace",
        "/data/tandem.yaml",
        {"mode": "disaggregated"},
        "not of type 'string'",
    ),
    ("PersistentVolumeClaim", "replace", "/spec/accessModes/0", "ReadWriteAll", "ReadWriteAll"),
    ("PersistentVolumeClaim", "add", "/spec/storageClass", "fast", "storageClass"),
    ("Job", "add", "/spec/template/spec/restart", "Never", "restart"),
    ("Job", "add", "/spec/retries", 3, "retries"),
    ("NetworkPolicy", "add", "/spec/ingres", [], "ingres"),
    ("NetworkPolicy", "replace", "/spec/policyTypes/0", 1, "not of type 'string'"),
    ("PodDisruptionBudget", "add", "/spec/maxUnavailabl", 1, "maxUnavailabl"),
    ("PodDisruptionBudget", "replace", "/spec/maxUnavailable", [], "is not valid under"),
    ("Deployment", "add", f"{POD_OF_DEPLOYMENT}/containers/0/readinessProb", {}, "readinessProb"),
    ("Deployment", "replace", f"{POD_OF_DEPLOYMENT}/volumes/1/name", "config", "twice"),
    ("RayCluster", "add", f"{POD}/containers/0/envFrom/0/configMap", {}, "configMap"),
    ("PodMonitor", "add", "/spec/podMetricsEndpoint", [], "podMetricsEndpoint"),
    ("PodMonitor", "replace", "/spec/podMetricsEndpoints/0/interval", "15", "does not match"),
    ("PrometheusRule", "add", "/spec/groups/0/rules/0/exp", "up", "exp"),
    ("PrometheusRule", "remove", "/spec/groups/0/rules/0/expr", None, "'expr' is a required"),
]


@pytest.mark.parametrize("kind, op, path, value, said", MISTAKES)
def test_a_wrong_field_fails(kind: str, op: str, path: str, value: Any, said: str) -> None:
    manifests = render(DEPLOY / "overlays/gpu8") + render(DEPLOY / "checkpoint")
    for file in ("pods.yaml", "rules.yaml"):
        manifests += yaml.safe_load_all((DEPLOY / "components/monitoring" / file).read_text())
    manifest = of_kind(manifests, kind)
    patch(manifest, [{"op": op, "path": path} | ({} if op == "remove" else {"value": value})])
    found = problems(manifest)
    assert len(found) == 1 and said in found[0]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_renders_the_same(folder: str) -> None:
    assert by_name(render(DEPLOY / folder)) == by_kubectl(DEPLOY / folder)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["overlays/gpu8", "overlays/hosts2"])
def test_kubectl_copies_fields_the_same(folder: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    with open(tmp_path / "deploy" / folder / "kustomization.yaml", "a") as file:
        file.write("components: [../../components/any-uid]\n")
    ours = render(DEPLOY / folder, DEPLOY / "components" / "any-uid")
    assert by_name(ours) == by_kubectl(tmp_path / "deploy" / folder)


def by_kubectl(folder: Path) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return by_name([*yaml.safe_load_all(text)])


def by_name(manifests: list[Manifest]) -> list[Manifest]:
    return sorted(manifests, key=lambda one: (one["kind"], one["metadata"]["name"]))


TARGET = {"kind": "Service", "name": "tandem"}
REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"patchesStrategicMerge": ["patch.yaml"]}, [], "only"),
    ({"patches": [{"path": "patch.yaml"}]}, [], "target"),
    (
        {"patches": [{"target": {"kind": "Service", "name": "tadem"}, "path": "patch.yaml"}]},
        [],
        "no Service 'tadem'",
    ),
    ({"patches": [{"target": TARGET, "path": "patch.yaml"}]}, {"spec": {}}, "only"),
    *(
        ({"patches": [{"target": TARGET, "path": "patch.yaml"}]}, [operation], said)
        for operation, said in (
            ({"op": "replace", "path": "/spec/port", "value": 1}, "there is no /spec/port"),
            ({"op": "remove", "path": "/spec/ports/3"}, "there is no /spec/ports/3"),
            ({"op": "test", "path": "/metadata/name", "value": "x"}, "is 'tandem', not 'x'"),
            ({"op": "copy", "path": "/spec/ports", "from": "/spec"}, "only"),
            ({"op": "merge", "path": "/spec/ports", "value": []}, "not supported"),
        )
    ),
    (
        {"replacements": [{"source": {"kind": "Service", "name": "x", "namespace": "y"}}]},
        [],
        "only",
    ),
    *(
        ({"replacements": [{"source": source, "targets": [target]}]}, [], said)
        for source, target, said in (
            (TARGET | {"fieldPath": "spec.port"}, {}, "there is no port"),
            (
                TARGET | {"fieldPath": "spec.ports"},
                {"select": TARGET, "fieldPaths": ["spec.portz"]},
                "there is no spec.portz",
            ),
        )
    ),
    ({"images": [{"name": "tadem", "newName": "x", "newTag": "1"}]}, [], "no container"),
    ({"images": [{"name": "tandem", "digest": "sha256:0"}]}, [], "only"),
    ({"configMapGenerator": [{"name": "tandem-config", "literals": ["a=b"]}]}, [], "only"),
    (
        {"configMapGenerator": [{"name": "other", "behavior": "replace", "files": ["patch.yaml"]}]},
        [],
        "no ConfigMap 'other'",
    ),
]


@pytest.mark.parametrize("fields, operations, said", REFUSED)
def test_what_is_not_rendered_is_refused(
    tmp_path: Path, fields: dict[str, Any], operations: Any, said: str
) -> None:
    (tmp_path / "base").symlink_to(DEPLOY / "base")
    (tmp_path / "patch.yaml").write_text(yaml.safe_dump(operations))
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["base"]} | fields))
    with pytest.raises((ValueError, KeyError), match=said):
        render(tmp_path)


def test_board_and_alerts_ask_for_what_is_told() -> None:
    """They use metrics of the reference page, which is generated; no panel hides another."""
    page = DEPLOY.parent / "docs" / "reference" / "metrics.md"
    told = set(re.findall(r"tandem_\w+", page.read_text()))
    there = {name + end for name in told for end in ("", "_bucket", "_total")}
    monitoring = DEPLOY / "components" / "monitoring"
    texts = [(monitoring / name).read_text() for name in ("tandem.json", "rules.yaml")]
    asked = set(re.findall(r"\btandem_\w+", "".join(texts)))
    assert len(asked) > 30 and asked <= there
    panels = json.loads(texts[0])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
