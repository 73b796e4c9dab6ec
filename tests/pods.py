"""Pods without Kubernetes: each has a network namespace on a shared bridge, with containers in it.

By default a container is a set of namespaces over this tree; tests/image runs the image with podman
instead. Needs root.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from benchmarks.harness.procs import ROOT, command_of, descendants, parents, python_path, wait_gone
from tandem.core.user_cache import user_cache

NETWORK = IPv4Address("10.77.0.0")
CAN_RUN = os.geteuid() == 0 and shutil.which("ip") is not None
NO_DNS = "nameserver 127.0.0.1\n"
"""resolv.conf that fails at once: other resolvers would take a minute for an unknown name."""
CONFIG, CLAIM = "etc", "claim"
"""Folders of a pod: the content of its ConfigMap, and the content of its claim."""
RunningSequence = subprocess.Popen[str]


@dataclass(frozen=True)
class Box:
    """A container as its manifest describes it. ``mounts`` maps a path to the folder of its pod."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    shm: str = "64m"
    mounts: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)


class Form(Protocol):
    """A way to run a container."""

    def command(self, pod: "Pod", box: Box) -> list[str]: ...

    def environ(self, pod: "Pod", box: Box) -> dict[str, str] | None:
        """Return the environment of that command on the host (None: this process's environment)."""
        ...

    def init(self, process: RunningSequence) -> int:
        """Return the host's pid of the container's process 1."""
        ...

    def pids(self, process: RunningSequence) -> Iterable[int]: ...

    def end(self, processes: Sequence[RunningSequence]) -> None: ...


@dataclass
class Pod:
    """A network namespace in which containers are started."""

    name: str
    address: str
    home: Path
    switch: str
    """Network namespace of the bridge that the pod is connected to."""
    form: Form
    processes: list[RunningSequence] = field(default_factory=list)

    def run(
        self, command: Sequence[str], *, shm: str = "64m", env: Mapping[str, str] | None = None
    ) -> RunningSequence:
        """Start a container that no manifest describes."""
        return self.begin(Box(command, env or {}, shm))

    def begin(self, box: Box) -> RunningSequence:
        """Start a container. Its command is process 1, stdout is a pipe and stderr a file."""
        with open(self.home / "log", "a") as log:
            process = subprocess.Popen(
                self.form.command(self, box),
                env=self.form.environ(self, box),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.processes.append(process)
        return process

    def init(self) -> int:
        """Return the host's pid of process 1 of the latest container."""
        return self.form.init(self.processes[-1])

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as a kubelet does."""
        os.kill(self.init(), signal.SIGTERM)

    def pids(self, part: str) -> list[int]:
        """Return the pids of processes whose command line contains ``part``; its words end in
        NUL."""
        found = {pid for process in self.processes for pid in self.form.pids(process)}
        return [pid for pid in sorted(found) if part.encode() in command_of(pid)]

    def end(self, heir: "Pod | None" = None) -> None:
        """Kill all processes of the pod. The content of its claim stays, or moves to ``heir``."""
        self.form.end(self.processes)
        self.processes.clear()
        if heir is not None:
            (heir.home / CLAIM).rmdir()
            (self.home / CLAIM).rename(heir.home / CLAIM)

    def log(self) -> str:
        return (self.home / "log").read_text()


_ENTER = """
mount -t tmpfs -o size={shm} none /dev/shm
mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
mount -t tmpfs none /mnt
for name in etc claim; do mkdir /mnt/$name && mount --bind {home}/$name /mnt/$name; done
exec "$@"
"""
"""Sets up the mounts of a container. Folders of the pod are bound to /mnt, because /etc is the
machine's."""


@dataclass(frozen=True)
class Tree:
    """Containers as process and mount namespaces over this machine's files and this tree.

    Folders of ``other`` replace those of the same name in the tree. The user is root, the root file
    system is writable, and no resource limit applies.
    """

    other: Path | None = None

    def command(self, pod: Pod, box: Box) -> list[str]:
        there = self.other.iterdir() if self.other else ()
        laid = [f"mount --bind {folder} {ROOT / folder.name}\n" for folder in there]
        enter = _ENTER.format(shm=box.shm, home=pod.home, folder=pod.home.parent)
        isolate = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        words = [self._moved(box, word) for word in box.command]
        script = "".join([*laid, enter])
        return ["ip", "netns", "exec", pod.name, *isolate, "bash", "-c", script, "-", *words]

    def environ(self, pod: Pod, box: Box) -> dict[str, str]:
        path = (Path(sys.executable).parent, pod.home.parent, os.environ["PATH"])
        own = {"HOME": str(pod.home), "XDG_CACHE_HOME": str(user_cache())}
        own |= {"PATH": ":".join(map(str, path)), "PYTHONPATH": python_path()}
        told = {name: self._moved(box, value) for name, value in box.env.items()}
        return own | {"RAY_USAGE_STATS_ENABLED": "0"} | told

    def init(self, process: RunningSequence) -> int:
        [init] = [pid for pid, parent in parents().items() if parent == process.pid]
        return init

    def pids(self, process: RunningSequence) -> Iterable[int]:
        return descendants(process.pid)

    def end(self, processes: Sequence[RunningSequence]) -> None:
        trees = {pid for process in processes for pid in descendants(process.pid)}
        for process in processes:
            process.kill()
            process.wait()
        wait_gone(trees)

    def _moved(self, box: Box, text: str) -> str:
        for path, name in box.mounts.items():
            if name in (CONFIG, CLAIM):
                text = re.sub(rf"(^|=){path}/", rf"\1/mnt/{name}/", text)
        return text


@contextmanager
def pods(
    names: Sequence[str], hosts: Mapping[str, str], form: Form | None = None
) -> Iterator[dict[str, Pod]]:
    """Create a pod for each name. ``hosts`` maps each host name of the cluster's DNS to a pod."""
    made: dict[str, Pod] = {}
    switch, form = f"pods{os.getpid()}", form or Tree()
    with TemporaryDirectory(prefix="pods", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tandem-gateway").symlink_to(ROOT / "deploy" / "gateway.sh")
        (folder / "resolv.conf").write_text(NO_DNS)
        try:
            _ip("netns add {0}", switch)
            _ip("-n {0} link add bridge type bridge", switch)
            _ip("-n {0} addr add {1}/24 dev bridge", switch, NETWORK + 254)
            _ip("-n {0} link set bridge up", switch)
            for i, one in enumerate(names):
                address = str(NETWORK + 1 + i)
                made[one] = Pod(f"{switch}-{i}", address, folder / one, switch, form)
                for part in (CONFIG, CLAIM):
                    (made[one].home / part).mkdir(parents=True)
                _connect(made[one], switch, f"pod{i}")
            lead(made, hosts)
            yield made
        finally:
            for pod in made.values():
                pod.end()
            for namespace in (*(pod.name for pod in made.values()), switch):
                subprocess.run(["ip", "netns", "del", namespace], check=False)


def lead(there: Mapping[str, Pod], hosts: Mapping[str, str]) -> None:
    """Set the pod that each host name resolves to, for all host names."""
    lines = [f"{there[pod].address} {host}\n" for host, pod in hosts.items()]
    # Written in place, because the file is mounted in every pod.
    path = next(iter(there.values())).home.parent / "hosts"
    path.write_text("".join(["127.0.0.1 localhost\n", *lines]))


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
