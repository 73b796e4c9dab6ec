"""Says what Kubernetes and KubeRay would refuse of a manifest, and what they would drop silently.

Pods and RayClusters are held against KubeRay's own definition (tests/data/kuberay, 1.7), in which
every unknown field is an error here; the few plain kinds of deploy/ are written out below.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

Schema = dict[str, Any]
CRD = Path(__file__).parent / "data" / "kuberay" / "ray.io_rayclusters.yaml"
TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Each as "path: what is wrong"; none for a manifest that is right."""
    kind = manifest.get("apiVersion"), manifest.get("kind")
    if kind not in _schemas():
        return [f"kind: {kind} is none of {sorted(_schemas())}"]
    errors = _Validator(_schemas()[kind]).iter_errors(manifest)
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in errors]


def _strict(schema: Schema) -> Schema:
    """The schema with every field that it does not know refused."""
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
    """A list that is a map, such as containers by name, has each key once."""
    found = [tuple(item.get(key) for key in keys) for item in items if isinstance(item, dict)]
    if len(set(found)) < len(found):
        yield ValidationError(f"one of {found} is there twice, by {keys}")


_Validator = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _are_unique})


def _fields(required: str, **properties: Schema) -> Schema:
    """A mapping of these fields alone; ``required`` lists names, parted by spaces."""
    return {"type": "object", "properties": properties, "required": required.split()}


def _manifest(required: str, **properties: Schema) -> Schema:
    meta = _fields("name", name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS)
    header = {"apiVersion": TEXT, "kind": TEXT, "metadata": meta}
    return _fields(f"apiVersion kind metadata {required}", **header, **properties)


@cache
def _schemas() -> dict[tuple[str, str], Schema]:
    crd = yaml.load(CRD.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [v for v in crd["spec"]["versions"] if v["name"] == "v1"]
    cluster = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    groups = cluster["properties"]["workerGroupSpecs"]
    pod = {**groups["items"]["properties"]["template"], "required": ["spec"]}
    port = _fields(
        "port",
        name=NAME,
        port=PORT,
        targetPort={"anyOf": [PORT, NAME]},
        protocol={"enum": ["TCP", "UDP", "SCTP"]},
    )
    modes = ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]
    written = {
        ("ray.io/v1", "RayCluster"): _manifest("spec", spec=cluster),
        ("apps/v1", "Deployment"): _manifest(
            "spec",
            spec=_fields(
                "selector template",
                replicas=COUNT,
                selector=_fields("matchLabels", matchLabels=TEXTS),
                template={**pod, "required": ["metadata", "spec"]},
            ),
        ),
        ("batch/v1", "Job"): _manifest(
            "spec", spec=_fields("template", backoffLimit=COUNT, template=pod)
        ),
        ("v1", "Service"): _manifest(
            "spec",
            spec=_fields(
                "ports selector",
                type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                selector=TEXTS,
                ports={"type": "array", "items": port, "minItems": 1},
            ),
        ),
        ("v1", "ConfigMap"): _manifest("data", data=TEXTS),
        ("v1", "PersistentVolumeClaim"): _manifest(
            "spec",
            spec=_fields(
                "accessModes resources",
                accessModes={"type": "array", "items": {"enum": modes}, "minItems": 1},
                resources=_fields("requests", requests=TEXTS),
                storageClassName=NAME,
            ),
        ),
    }
    return {kind: _strict(schema) for kind, schema in written.items()}
