"""An overlay of deploy/ as a cluster sees it: its manifests, and the config that it serves."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.core.config import TandemConfig, load
from tests.kustomize import Manifest, render

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = {"": 1, "m": 1e-3} | {f"{letter}i": 1 << 10 * (i + 1) for i, letter in enumerate("KMGT")}


@dataclass(frozen=True)
class Deployed:
    cluster: Manifest
    gateway: Manifest
    service: Manifest
    config_map: Manifest
    """The gateway's ConfigMap."""
    others: dict[str, dict[str, str]]
    """Data of the other ConfigMaps, by name."""
    policies: tuple[Manifest, ...]
    budgets: tuple[Manifest, ...]

    @property
    def groups(self) -> dict[str, Manifest]:
        """Worker groups by name."""
        groups = self.cluster["spec"]["workerGroupSpecs"]
        assert len({group["groupName"] for group in groups}) == len(groups)
        return {group["groupName"]: group for group in groups}

    @property
    def gateway_pod(self) -> Manifest:
        return self.gateway["spec"]["template"]["spec"]

    @property
    def ray_pods(self) -> list[Manifest]:
        groups = [self.cluster["spec"]["headGroupSpec"], *self.groups.values()]
        return [group["template"]["spec"] for group in groups]

    @property
    def pods(self) -> list[Manifest]:
        return [*self.ray_pods, self.gateway_pod]

    def labels(self) -> list[dict[str, str]]:
        """Return the labels of each of ``pods``, including those that the operator adds."""
        cluster = self.cluster["metadata"]["name"]
        groups = [self.cluster["spec"]["headGroupSpec"], *self.groups.values()]
        found = []
        for i, group in enumerate(groups):
            given = {"ray.io/cluster": cluster, "ray.io/node-type": "worker" if i else "head"}
            found.append(group["template"]["metadata"]["labels"] | given)
        return [*found, self.gateway["spec"]["template"]["metadata"]["labels"]]

    @property
    def config(self) -> TandemConfig:
        """The config that the gateway loads, according to its arguments, from the mounted
        volume."""
        options = [
            arg.removeprefix("--").partition("=") for arg in container(self.gateway_pod)["args"]
        ]
        [path] = [Path(value) for option, _, value in options if option == "config"]
        [mount] = [m for m in mounts(self.gateway_pod) if Path(m["mountPath"]) == path.parent]
        volume = volumes(self.gateway_pod)[mount["name"]]
        assert volume["configMap"]["name"] == self.config_map["metadata"]["name"]
        text = self.config_map["data"][path.name]
        return load_text(text, [value for option, _, value in options if option == "set"])


def deployed(folder: str, *components: str) -> Deployed:
    """Return the manifests that ``kubectl apply -k deploy/FOLDER`` would apply, with these
    components."""
    by_kind = defaultdict[str, list[Manifest]](list)
    for manifest in render(DEPLOY / folder, *(DEPLOY / "components" / one for one in components)):
        by_kind[manifest["kind"]].append(manifest)
    ones = [by_kind.pop(kind) for kind in ("RayCluster", "Deployment", "Service")]
    config_map, *others = by_kind.pop("ConfigMap")
    told = {one["metadata"]["name"]: one["data"] for one in others}
    many = [tuple(by_kind.pop(kind)) for kind in ("NetworkPolicy", "PodDisruptionBudget")]
    assert all(len(found) == 1 for found in ones) and by_kind.keys() <= {"PersistentVolumeClaim"}
    return Deployed(*(one for [one] in ones), config_map, told, *many)


def load_text(text: str, sets: list[str]) -> TandemConfig:
    """Load the config in the same way as ``tandem serve``."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "tandem.yaml")
        path.write_text(text)
        return load(path, sets)


def container(pod: Manifest) -> Manifest:
    [only] = pod["containers"]
    return only


def mounts(pod: Manifest) -> list[Manifest]:
    return container(pod).get("volumeMounts", [])


def volumes(pod: Manifest) -> dict[str, Manifest]:
    return {volume["name"]: volume for volume in pod.get("volumes", [])}


def amount(quantity: str) -> float:
    """Convert a Kubernetes quantity, such as 500m or 4Gi, to a number."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    assert match, quantity
    return float(match[1]) * UNITS[match[2]]


def ray_resources(group: Manifest) -> dict[str, int]:
    """Return the resources that a pod of the group offers to Ray; the operator derives them from
    limits."""
    limits = container(group["template"]["spec"])["resources"]["limits"]
    params = group["rayStartParams"]
    cpus = params.get("num-cpus", math.ceil(amount(limits["cpu"])))
    gpus = params.get("num-gpus", limits.get("nvidia.com/gpu", 0))
    return {"CPU": int(cpus), "GPU": int(gpus)}


def ranks_per_pod(group: Manifest, resources: Mapping[str, float]) -> int:
    """Return how many ranks that need ``resources`` Ray would place on one pod of the group."""
    offered = ray_resources(group)
    return min(int(offered[name] // needed) for name, needed in resources.items())
