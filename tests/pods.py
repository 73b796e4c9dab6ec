"""Pods without Kubernetes: namespaces of their own for processes, mounts and network, one bridge.
In each what a pod of deploy/ is given, and Ray as KubeRay's operator begins it. Needs root."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.driven.procs import ROOT, command_of, descendants, parents, wait_gone
from core.user_cache import user_cache
from tests.deployed import Deployed, amount, container, mounts, ray_resources, volumes
from tests.kustomize import Manifest

NETWORK = IPv4Address("10.77.0.0")
CAN_RUN = os.geteuid() == 0 and shutil.which("ip") is not None
TOKEN = "b8d3" * 16
NO_DNS = "nameserver 127.0.0.1\n"
"""Refuses at once: a name that is not in hosts would cost a minute elsewhere."""
ENTER = """
mount -t tmpfs -o size={shm} none /dev/shm
mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
mount -t tmpfs none /mnt && cp {home}/etc/* /mnt/ 2>/dev/null
mkdir /mnt/claim && mount --bind {home}/claim /mnt/claim
exec "$@"
"""
"""What every container has to itself. Its configMap lies in /mnt, for /etc is the machine's; what
its pod has a claim on lies there too, and outlasts it."""


@dataclass
class Pod:
    """A network of its own, in which containers are begun one after the other."""

    name: str
    address: str
    home: Path
    switch: str
    """The namespace of the bridge that it hangs on."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(
        self, command: Sequence[str], *, shm: str = "64m", env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Begin a container, its command as process 1; stdout is a pipe, stderr a file."""
        enter = ENTER.format(shm=shm, home=self.home, folder=self.home.parent)
        isolate = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        path = f"{Path(sys.executable).parent}:{ROOT / 'deploy'}:{os.environ['PATH']}"
        own = {"HOME": str(self.home), "XDG_CACHE_HOME": str(user_cache())}
        own |= {"PATH": path, "PYTHONPATH": str(ROOT)}
        with open(self.home / "log", "a") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *isolate, "bash", "-c", enter, "-", *command],
                env=own | {"RAY_USAGE_STATS_ENABLED": "0"} | (env or {}),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.processes.append(process)
        return process

    def init(self) -> int:
        """The pid here of process 1 of its latest container."""
        [init] = [pid for pid, parent in parents().items() if parent == self.processes[-1].pid]
        return init

    def pids(self, part: str) -> list[int]:
        """Of the processes in it whose command has ``part`` in it; words end in NUL."""
        found = {p for process in self.processes for p in descendants(process.pid)}
        return [pid for pid in sorted(found) if part.encode() in command_of(pid)]

    def end(self) -> None:
        """Kill all in it. Its address and what it claims remain."""
        _end(self.processes)
        self.processes.clear()

    def log(self) -> str:
        return (self.home / "log").read_text()


@contextmanager
def pods(names: Sequence[str], hosts: dict[str, str]) -> Iterator[dict[str, Pod]]:
    """A pod for each name; ``hosts`` tells which pod a host name of the cluster's DNS leads to."""
    made: dict[str, Pod] = {}
    switch = f"pods{os.getpid()}"
    with TemporaryDirectory(prefix="pods", ignore_cleanup_errors=True) as folder:
        try:
            _ip("netns add {0}", switch)
            _ip("-n {0} link add bridge type bridge", switch)
            _ip("-n {0} addr add {1}/24 dev bridge", switch, NETWORK + 254)
            _ip("-n {0} link set bridge up", switch)
            for i, name in enumerate(names):
                made[name] = Pod(f"{switch}-{i}", str(NETWORK + 1 + i), Path(folder, name), switch)
                for part in ("etc", "claim"):
                    (made[name].home / part).mkdir(parents=True)
                _connect(made[name], switch, f"pod{i}")
            lines = [f"{made[pod].address} {host}\n" for host, pod in hosts.items()]
            Path(folder, "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
            Path(folder, "resolv.conf").write_text(NO_DNS)
            yield made
        finally:
            _end([process for pod in made.values() for process in pod.processes])
            for namespace in (*(pod.name for pod in made.values()), switch):
                subprocess.run(["ip", "netns", "del", namespace], check=False)


def _connect(pod: Pod, switch: str, port: str) -> None:
    _ip("netns add {0}", pod.name)
    _ip("-n {0} link add {1} type veth peer name eth0 netns {2}", switch, port, pod.name)
    _ip("-n {0} link set {1} master bridge up", switch, port)
    _ip("-n {0} addr add {1}/24 dev eth0", pod.name, pod.address)
    _ip("-n {0} link set eth0 up", pod.name)
    _ip("-n {0} link set lo up", pod.name)
    _ip("-n {0} route add default via {1}", pod.name, NETWORK + 254)


def _ip(command: str, *values: object) -> None:
    subprocess.run(["ip", *command.format(*values).split()], check=True)


def _end(processes: list[subprocess.Popen[str]]) -> None:
    trees = {pid for process in processes for pid in descendants(process.pid)}
    for process in processes:
        process.kill()
        process.wait()
    wait_gone(trees)


def ray_command(it: Deployed, group: Manifest) -> list[str]:
    """As the operator writes it: what the group says, and what it reads off the pod's limits."""
    name = it.cluster["metadata"]["name"]
    is_head = group is it.cluster["spec"]["headGroupSpec"]
    address = f"{name}-head-svc:6379"
    own = {f"num-{kind.lower()}s": str(n) for kind, n in ray_resources(group).items()}
    options = own | {"metrics-export-port": "8080"} | group["rayStartParams"]
    options |= {"dashboard-host": "0.0.0.0"} if is_head else {"address": address}
    words = " ".join(f"--{key}={value}" for key, value in options.items())
    start = f"ulimit -n 65536; ray start {'--head ' if is_head else ''}{words} --block"
    wait = f"until ray health-check --address {address} &> /dev/null; do sleep 1; done; "
    return ["bash", "-c", "--", start if is_head else wait + start]


def gateway_command(it: Deployed) -> tuple[list[str], dict[str, str], str]:
    """The command, the environment and the bytes of /dev/shm of the gateway's container."""
    box = container(it.gateway_pod)
    [mount] = [m for m in mounts(it.gateway_pod) if m["mountPath"] == "/dev/shm"]
    size = amount(volumes(it.gateway_pod)[mount["name"]]["emptyDir"]["sizeLimit"])
    [config] = [m["mountPath"] for m in mounts(it.gateway_pod) if m["name"] == "config"]
    args = [arg.replace(f"{config}/", "/mnt/") for arg in box["args"]]
    command = ["gateway.sh" if word == "tandem-gateway" else word for word in box["command"]]
    return [*command, *args], environment(it, it.gateway_pod), str(int(size))


def environment(
    it: Deployed, pod: Manifest, labels: dict[str, str] | None = None
) -> dict[str, str]:
    """Of the container in a pod of these labels; what Secrets hold is TOKEN."""
    box, told = container(pod), dict[str, str]()
    for source in box.get("envFrom", []):
        told |= it.others.get(source["configMapRef"]["name"], {})
    claims = [name for name, one in volumes(pod).items() if "persistentVolumeClaim" in one]
    paths = [m["mountPath"] for m in mounts(pod) if m["name"] in claims]
    for one in box["env"]:
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = one.get("value", TOKEN)
        if path:
            value = (labels or {}).get(path.removeprefix("metadata.labels['")[:-2], "")
        for claimed in paths:
            value = re.sub(f"^{claimed}/", "/mnt/claim/", value)
        told[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], value)
    # The operator gives the first two to pods of Ray, and with a group's pods its name.
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    if labels:
        given["RAY_NODE_TYPE_NAME"] = labels["ray.io/group"]
    return given | told
