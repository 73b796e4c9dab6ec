"""Find errors in a manifest: what Kubernetes and KubeRay would reject or silently drop.

Pods and RayClusters are checked against KubeRay's own definition (tests/data/kuberay, 1.7). Every
unknown field is an error here. Prometheus kinds are checked against the fields that deploy/ uses.
All other kinds are checked against Kubernetes' definitions (kubernetes-validate, strict).
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

Schema = dict[str, Any]
CRD = Path(__file__).parent / "data" / "kuberay" / "ray.io_rayclusters.yaml"
VERSION = "1.37"
"""Kubernetes version whose definitions the core kinds are checked against."""
TEXT = {"type": "string"}


def _all_of(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [*fields]}


TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION = {"type": "string", "pattern": "^[0-9]+[smh]$"}
ALERT = _all_of(alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
ENDPOINT = _all_of(port=TEXT, interval=DURATION)
WATCHED: dict[str, Schema] = {
    "PodMonitor": _all_of(
        selector=_all_of(matchLabels=TEXTS),
        podMetricsEndpoints={"type": "array", "items": ENDPOINT},
    ),
    "PrometheusRule": _all_of(
        groups={
            "type": "array",
            "items": _all_of(name=TEXT, rules={"type": "array", "items": ALERT}),
        }
    ),
}
"""Specs of monitoring.coreos.com/v1, as far as deploy/ uses them."""
MODES = {"ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"}
NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return the problems of a manifest, each in the form "path: problem"."""
    kind = manifest.get("apiVersion"), manifest.get("kind")
    if kind == ("ray.io/v1", "RayCluster"):
        found = _found(_cluster(), manifest)
    elif kind[0] == "monitoring.coreos.com/v1" and kind[1] in WATCHED:
        whole = _all_of(apiVersion=TEXT, kind=TEXT, metadata=_all_of(name=TEXT))
        whole["properties"]["spec"] = WATCHED[manifest["kind"]]
        found = _found(_strict(whole), manifest)
    else:
        try:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
            found = []
        except kubernetes_validate.SchemaNotFoundError:
            return [f"kind: {kind} is none of Kubernetes {VERSION} or KubeRay"]
        except kubernetes_validate.ValidationError as error:
            found = [_line(error)]
        if not found and manifest["kind"] in ("Deployment", "Job"):
            found = _found(_pod(), manifest["spec"]["template"])
    return found or [*_outside(manifest)]


def _outside(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield problems that Kubernetes rejects although the types are right."""
    if not NAME.fullmatch(name := manifest["metadata"]["name"]):
        yield f"metadata/name: {name!r} is no name"
    for mode in set(manifest.get("spec", {}).get("accessModes", ())) - MODES:
        yield f"spec/accessModes: {mode!r} is none of {sorted(MODES)}"
    for path, key, value in _leaves(manifest):
        if key in ("port", "containerPort") and isinstance(value, int) and value > 65535:
            yield f"{path}: {value} is above the maximum of a port"


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from _leaves(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", str(key), value


def _found(schema: Schema, tree: Any) -> list[str]:
    return [_line(error) for error in _Validator(schema).iter_errors(tree)]


def _line(error: Any) -> str:
    return f"{'/'.join(map(str, error.path))}: {error.message}"


def _strict(schema: Schema) -> Schema:
    """Return the schema with every unknown field forbidden."""
    strict = dict(schema)
    if "properties" in schema:
        strict["properties"] = {name: _strict(s) for name, s in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            strict[inner] = _strict(schema[inner])
    return strict


def _are_unique(
    validator: Any, keys: list[str], items: list[Any], schema: Schema
) -> Iterator[ValidationError]:
    """Check that each key occurs once in a list with map semantics, such as containers by name."""
    found = [tuple(item.get(key) for key in keys) for item in items if isinstance(item, dict)]
    if len(set(found)) < len(found):
        yield ValidationError(f"one of {found} is there twice, by {keys}")


_Validator = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _are_unique})


@cache
def _cluster() -> Schema:
    crd = yaml.load(CRD.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    found = version["schema"]["openAPIV3Schema"]
    meta = {name: {"type": "object"} for name in ("labels", "annotations")}
    properties = found["properties"] | {
        "metadata": {"type": "object", "properties": meta | {"name": {"type": "string"}}}
    }
    return _strict(found | {"properties": properties, "required": ["metadata", "spec"]})


def _pod() -> Schema:
    groups = _cluster()["properties"]["spec"]["properties"]["workerGroupSpecs"]
    template: Schema = groups["items"]["properties"]["template"]
    return template
