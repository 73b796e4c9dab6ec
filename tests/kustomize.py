"""Render the subset of kustomize that deploy/ uses, strictly.

Any other feature is an error, and so is a patch, an image or a generator that matches nothing.
Where kubectl is installed, a test compares the two.
"""

import hashlib
import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tandem.core.config_source import _StrictLoader, read_yaml

Manifest = dict[str, Any]
GENERATED = "generated"
"""Key that marks a manifest during the build: its name gets a hash of its content as a suffix."""
SAFE_DIGITS = str.maketrans("013ae", "ghkmt")
FIELDS = {
    "kustomization": {
        *("apiVersion", "kind", "resources", "components"),
        *("configMapGenerator", "images", "patches", "replacements"),
    },
    "replacements": {"source", "targets"},
    "source": {"kind", "name", "fieldPath"},
    "targets": {"select", "fieldPaths"},
    "configMapGenerator": {"name", "behavior", "files"},
    "images": {"name", "newName", "newTag"},
    "patches": {"target", "path"},
    "target": {"kind", "name"},
    "operation": {"op", "path", "value"},
}


def render(folder: Path, *components: Path) -> list[Manifest]:
    """Return every manifest of a kustomization as it is applied, with these components."""
    manifests = _build(folder, [])
    for component in components:
        _build(component, manifests)
    names = {m["metadata"]["name"]: _hashed_name(m) for m in manifests if m.pop(GENERATED, False)}
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap":
            name = manifest["metadata"]["name"]
            manifest["metadata"]["name"] = names.get(name, name)
        for node in _mappings(manifest):
            if "configMap" in node:
                node["configMap"]["name"] = names[node["configMap"]["name"]]
    return manifests


def _build(folder: Path, manifests: list[Manifest]) -> list[Manifest]:
    """Add a kustomization's manifests to ``manifests``, which a component also changes."""
    tree = _checked(read_yaml(folder / "kustomization.yaml"), "kustomization")
    for resource in tree.get("resources", []):
        path = folder / resource
        manifests += _build(path, []) if path.is_dir() else _read(path)
    for component in tree.get("components", []):
        if read_yaml(folder / component / "kustomization.yaml")["kind"] != "Component":
            raise ValueError(f"{component} is no Component")
        _build(folder / component, manifests)
    for generator in tree.get("configMapGenerator", []):
        _generate(manifests, folder, _checked(generator, "configMapGenerator"))
    for entry in tree.get("patches", []):
        target = _checked(_checked(entry, "patches")["target"], "target")
        operations = yaml.safe_load((folder / entry["path"]).read_text())
        patch(_found(manifests, target["kind"], target["name"]), operations)
    for image in tree.get("images", []):
        _set_image(manifests, _checked(image, "images"))
    for replacement in tree.get("replacements", []):
        _replace(manifests, _checked(replacement, "replacements"))
    return manifests


def _read(path: Path) -> list[Manifest]:
    return deepcopy(_parsed(path.read_text(encoding="utf-8")))


@cache
def _parsed(text: str) -> list[Manifest]:
    return list(yaml.load_all(text, Loader=_StrictLoader))


def _checked(tree: Manifest, where: str) -> Manifest:
    if not isinstance(tree, dict) or not tree.keys() <= FIELDS[where]:
        raise ValueError(f"{where}: only {sorted(FIELDS[where])} are supported, got {tree!r}")
    return tree


def _found(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    for manifest in manifests:
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name):
            return manifest
    raise ValueError(f"there is no {kind} {name!r}")


def _generate(manifests: list[Manifest], folder: Path, generator: Manifest) -> None:
    behavior = generator.get("behavior", "create")
    name = generator["name"]
    data = {Path(file).name: (folder / file).read_text() for file in generator["files"]}
    if behavior == "replace":
        _found(manifests, "ConfigMap", name)["data"] = data
    elif behavior == "create":
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
        manifests.append(made | {GENERATED: True})
    else:
        raise ValueError(f"configMapGenerator: behavior {behavior!r} is not supported")


def _set_image(manifests: list[Manifest], image: Manifest) -> None:
    containers = [
        container
        for manifest in manifests
        for node in _mappings(manifest)
        for container in node.get("containers", [])
        if container["image"].rpartition(":")[0] == image["name"]
    ]
    if not containers:
        raise ValueError(f"no container has the image {image['name']!r}")
    for container in containers:
        container["image"] = f"{image['newName']}:{image['newTag']}"


def _replace(manifests: list[Manifest], replacement: Manifest) -> None:
    """Copy the value of a field to fields of other manifests; ``*`` in a path is every item of a
    list."""
    source = _checked(replacement["source"], "source")
    [value] = _fields(_found(manifests, source["kind"], source["name"]), source["fieldPath"])
    for target in replacement["targets"]:
        selected = _checked(_checked(target, "targets")["select"], "target")
        manifest = _found(manifests, selected["kind"], selected["name"])
        for path in target["fieldPaths"]:
            parents, _, last = path.rpartition(".")
            for node in _fields(manifest, parents):
                node[_key(node, last, path)] = _copy(value)


def _fields(node: Any, path: str) -> list[Any]:
    name, _, rest = path.partition(".")
    children = node if name == "*" else [node[_key(node, name, path)]]
    return [found for child in children for found in (_fields(child, rest) if rest else [child])]


def _mappings(node: Any) -> Iterator[Manifest]:
    if isinstance(node, dict):
        yield node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _mappings(child)


def _hashed_name(config_map: Manifest) -> str:
    """Return the name with kustomize's suffix, which makes pods roll when the data changes."""
    fields = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    digits = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{config_map['metadata']['name']}-{digits.translate(SAFE_DIGITS)}"


def patch(manifest: Manifest, operations: list[Manifest]) -> None:
    """Apply a JSON patch (RFC 6902) in place: add, replace, remove and test."""
    for operation in operations:
        _operate(manifest, **_checked(operation, "operation"))


def _operate(manifest: Manifest, op: str, path: str, value: Any = None) -> None:
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])
    node: Any = manifest
    for part in parents:
        node = node[_key(node, part, path)]
    if op == "add":
        if isinstance(node, list):
            node.insert(len(node) if last == "-" else int(last), _copy(value))
        else:
            node[last] = _copy(value)
        return
    key = _key(node, last, path)
    if op == "replace":
        node[key] = _copy(value)
    elif op == "remove":
        del node[key]
    elif op != "test":
        raise ValueError(f"patch: {op!r} is not supported")
    elif node[key] != value:
        raise ValueError(f"patch: {path} is {node[key]!r}, not {value!r}")


def _copy(value: Any) -> Any:
    """Return a deep copy, because YAML anchors share values and a later patch changes only one of
    them."""
    return json.loads(json.dumps(value))


def _key(node: Any, part: str, path: str) -> Any:
    key = int(part) if isinstance(node, list) else part
    if key not in (range(len(node)) if isinstance(node, list) else node):
        raise ValueError(f"patch: there is no {path}, for want of {part!r}")
    return key
