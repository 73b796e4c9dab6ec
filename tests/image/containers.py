"""Run containers of an image as a kubelet would: by podman, in the network of their pod."""

import resource
import subprocess
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from benchmarks.harness.procs import descendants
from tests.deployed import amount
from tests.pods import Box, Pod, RunningSequence

PODMAN = "podman", "--cgroup-manager=cgroupfs", "--runtime=runc"
USER = "1000"
CLOSED = "--user", USER, "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only"
"""Restrictions of Pod Security's level "restricted", and the manifests' read-only root."""

MOST = {"nofile": 65536, "nproc": 30000}


class Image:
    """One image for all containers.

    Containers run as user 1000 without capabilities. Everything except the volumes of the pod is
    read-only, and the limits of the manifests apply.
    """

    def __init__(self, tag: str) -> None:
        self._tag, self._numbers = tag, count()

    def command(self, pod: Pod, box: Box) -> list[str]:
        name = f"{pod.name}-{next(self._numbers)}"
        network = f"ns:/run/netns/{pod.name}"
        words = [*PODMAN, "run", "--rm", "--name", name, "--network", network, "--no-hosts"]
        words += [*_ulimits(), "--pids-limit=-1"]
        words += [f"--shm-size={box.shm}", *self._volumes(pod, box), *self._limits(box)]
        words += [f"--env={name}={value}" for name, value in box.env.items()]
        return [*words, "--entrypoint", "", self._tag, *box.command]

    def _volumes(self, pod: Pod, box: Box) -> list[str]:
        shared = [f"{pod.home.parent / one}:/etc/{one}" for one in ("hosts", "resolv.conf")]
        found = [f"--volume={one}:ro" for one in shared]
        for path, name in box.mounts.items():
            folder = pod.home / name
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
            found.append(f"--volume={folder}:{path}")
        return found

    def _limits(self, box: Box) -> list[str]:
        if not box.limits:
            return []
        memory = int(amount(box.limits["memory"]))
        found = [f"--memory={memory}", f"--memory-swap={memory}"]
        return [*CLOSED, "--read-only-tmpfs=false", *found, f"--cpus={amount(box.limits['cpu'])}"]

    def environ(self, pod: Pod, box: Box) -> dict[str, str] | None:
        return None

    def init(self, process: RunningSequence) -> int:
        text = subprocess.run(
            [*PODMAN, "inspect", "--format", "{{.State.Pid}}", name_of(process)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return int(text)

    def pids(self, process: RunningSequence) -> Iterable[int]:
        if process.poll() is not None:
            return ()
        init = self.init(process)
        return {init, *descendants(init)}

    def end(self, processes: Sequence[RunningSequence]) -> None:
        for process in processes:
            gone = [*PODMAN, "rm", "--force", "--time=0", "--ignore", name_of(process)]
            subprocess.run(gone, check=True, capture_output=True)
            process.wait()


def _ulimits() -> list[str]:
    """Return arguments for ulimits. A container cannot raise those that this process cannot
    raise."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    most = {name: min(MOST[name], resource.getrlimit(kind)[1]) for name, kind in kinds.items()}
    return [f"--ulimit={name}={value}:{value}" for name, value in most.items()]


def name_of(process: RunningSequence) -> str:
    args = process.args
    assert isinstance(args, list)
    return str(args[args.index("--name") + 1])


def inside(pod: Pod, command: Sequence[str]) -> str:
    """Return a command's output in the latest container of a pod, like ``kubectl exec``."""
    done = subprocess.run(
        [*PODMAN, "exec", name_of(pod.processes[-1]), *command], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def most_memory_bytes(pod: Pod) -> int:
    """Return the peak memory of the pod's latest container, including reclaimable page cache."""
    for line in Path(f"/proc/{pod.init()}/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.max_usage_in_bytes").read_text())
    [path] = [line[3:] for line in Path(f"/proc/{pod.init()}/cgroup").read_text().splitlines()]
    return int(Path(f"/sys/fs/cgroup{path}/memory.peak").read_text())
