"""Run manifests in pods (tests/pods.py) as KubeRay's operator and kubelets would, and check the
result as a client."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.machines import lines
from tests.deployed import Deployed, amount, container, mounts, ray_resources, volumes
from tests.kustomize import Manifest
from tests.pods import CLAIM, CONFIG, Box, Pod, RunningSequence

TOKEN = "b8d3" * 16
GENERATE = ("tandem", "generate", "def fibonacci(n):", "--max-tokens=16", "--address=tandem:50051")
SHM = "/dev/shm"
OF_VOLUMES = {"configMap": CONFIG, "persistentVolumeClaim": CLAIM}


def hosts_of(it: Deployed, head: str = "head", door: str = "gateway") -> dict[str, str]:
    """Return the pod that each host name of the deployment's Services resolves to."""
    return {f"{it.cluster['metadata']['name']}-head-svc": head, "tandem": door}


def begin_ray(pod: Pod, it: Deployed, group: Manifest, replica: str = "") -> None:
    """Start a Ray pod of a group. ``replica`` is the operator's label on pods of multi-host
    groups."""
    spec = group["template"]["spec"]
    labels = {"ray.io/group": group.get("groupName", "headgroup")}
    if replica:
        labels["ray.io/worker-group-replica-name"] = replica
    limits = container(spec)["resources"]["limits"]
    # The operator gives every pod of Ray a /dev/shm as large as its memory.
    shm = str(int(amount(limits["memory"])))
    box = Box(ray_command(it, group), environment(it, spec, labels), shm, placed(spec), limits)
    pod.begin(box)


def begin_gateway(pod: Pod, it: Deployed) -> RunningSequence:
    """Start a gateway and return its process once it is ready."""
    process = start_gateway(pod, it)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready grpc="):
            return process
    raise AssertionError(pod.log())


def start_gateway(pod: Pod, it: Deployed) -> RunningSequence:
    spec = it.gateway_pod
    for name, text in it.config_map["data"].items():
        (pod.home / CONFIG / name).write_text(text)
    box = container(spec)
    [mount] = [m for m in mounts(spec) if m["mountPath"] == SHM]
    shm = str(int(amount(volumes(spec)[mount["name"]]["emptyDir"]["sizeLimit"])))
    command = [*box["command"], *box["args"]]
    limits = box["resources"]["limits"]
    return pod.begin(Box(command, environment(it, spec), shm, placed(spec), limits))


def ray_command(it: Deployed, group: Manifest) -> list[str]:
    """Return the command that the operator writes, from the group's parameters and the pod's
    limits."""
    name = it.cluster["metadata"]["name"]
    is_head = group is it.cluster["spec"]["headGroupSpec"]
    address = f"{name}-head-svc:6379"
    memory = container(group["template"]["spec"])["resources"]["limits"]["memory"]
    own = {f"num-{kind.lower()}s": str(n) for kind, n in ray_resources(group).items()}
    own |= {"memory": str(int(amount(memory))), "dashboard-agent-listen-port": "52365"}
    options = own | {"metrics-export-port": "8080"} | group["rayStartParams"]
    options |= {"dashboard-host": "0.0.0.0"} if is_head else {"address": address}
    words = " ".join(f"--{key}={value}" for key, value in options.items())
    start = f"ulimit -n 65536; ray start {'--head ' if is_head else ''}{words} --block"
    # In a worker pod an init container of the operator waits.
    wait = f"until ray health-check --address {address} &> /dev/null; do sleep 1; done; "
    return ["bash", "-c", "--", start if is_head else wait + start]


def placed(pod: Manifest) -> dict[str, str]:
    """Return which folder of a pod is mounted at each path, except /dev/shm, whose size is set."""
    found = {}
    for mount in mounts(pod):
        [kind] = volumes(pod)[mount["name"]].keys() - {"name"}
        if mount["mountPath"] != SHM:
            found[mount["mountPath"]] = OF_VOLUMES.get(kind, f"empty-{mount['name']}")
    return found


def environment(
    it: Deployed, pod: Manifest, labels: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of the container in a pod with these labels. Secrets hold TOKEN."""
    box, told = container(pod), dict[str, str]()
    for source in box.get("envFrom", []):
        told |= it.others.get(source["configMapRef"]["name"], {})
    for one in box["env"]:
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = one.get("value", TOKEN)
        if path:
            value = (labels or {}).get(path.removeprefix("metadata.labels['")[:-2], "")
        told[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], value)
    # The operator sets the first two in every pod of Ray, and the group's name in its pods.
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    if labels:
        given["RAY_NODE_TYPE_NAME"] = labels["ray.io/group"]
    return given | told


def generated(client: Pod) -> str:
    process = client.run(GENERATE)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, client.log()
    return text


@contextmanager
def asking(client: Pod, folder: Path, seed: int, num_clients: int) -> Iterator[Callable[[], int]]:
    """Run tests/chaos/asker.py against the Service during the block. Yields a function that returns
    the number of answers so far."""
    words = "--address", "tandem:50051", "--folder", str(folder), "--seed", str(seed)
    command = "python", "-m", "tests.chaos.asker", *words, "--clients", str(num_clients)
    process = client.run(command)
    try:
        yield lambda: len(lines(folder / "answers.jsonl"))
    finally:
        (folder / "stop").touch()
        process.wait(180)
    assert process.returncode == 0, client.log()[-3000:]


def figures(pod: Pod, host: str = "tandem") -> str:
    """Return a gateway's metrics as Prometheus would read them from ``pod``."""
    address = f"http://{host}:9400/metrics"
    read = f"from urllib.request import urlopen; print(urlopen({address!r}).read().decode())"
    text, _ = pod.run(("python", "-c", read)).communicate(timeout=60)
    return text


def told(pod: Pod, name: str) -> float:
    [value] = re.findall(rf"^{name} (\S+)$", figures(pod), flags=re.M)
    return float(value)


def ranks_in(pod: Pod) -> list[str]:
    kinds = {"prefill": "ray::PrefillActor", "decode": "ray::DecodeActor"}
    return [kind for kind, title in kinds.items() for _ in pod.pids(title)]
