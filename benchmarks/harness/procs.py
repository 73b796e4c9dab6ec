"""A local `tandem serve` as a process, a separate Ray, and checks that nothing is left behind."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from tandem.core.user_cache import user_cache

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tandem.cluster.cli")


def python_path(tree: Path = ROOT, *first: Path) -> str:
    """Return a PYTHONPATH that imports the modules of ``tree``; the folders ``first`` take
    precedence."""
    return os.pathsep.join(map(str, (*first, tree / "src", tree)))


@dataclass
class Serving:
    """A running `tandem serve`. ``address`` is HOST:PORT; ``log`` collects stderr."""

    process: subprocess.Popen[str]
    address: str
    log: list[str] = field(default_factory=list)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and return the exit code; assert that the whole process tree is gone."""
        tree = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        wait_gone(tree)
        return code


@dataclass(frozen=True)
class RayHead:
    """A Ray started by ``ray start --head``; ``env`` is the environment of processes that join
    it."""

    pid: int
    address: str
    env: dict[str, str]


@contextmanager
def ray_head(
    *, with_token: bool, num_cpus: int = 8, store: Path = Path("/dev/shm")
) -> Iterator[RayHead]:
    """Start a local Ray on the loopback interface, with a separate home folder.

    Its object store lies in ``store``.
    """
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as home:
        env = os.environ | {"HOME": home, "XDG_CACHE_HOME": str(user_cache())}
        env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
        if with_token:
            token = Path(home, ".ray", "auth_token")
            token.parent.mkdir()
            token.write_text(secrets.token_hex(32))
        address = f"127.0.0.1:{free_port()}"
        options = ("--block", "--include-dashboard=false", "--disable-usage-stats")
        sizes = (f"--num-cpus={num_cpus}", f"--object-store-memory={128 << 20}")
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", "--head", *options, *sizes]
            + [f"--port={address.rpartition(':')[2]}", f"--temp-dir={home}/r"]
            + [f"--plasma-directory={store}"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = []
            while "Ray runtime started" not in (line := process.stdout.readline()):
                said.append(line)
                assert line, "".join(said)
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield RayHead(process.pid, address, env)
        finally:
            tree = {process.pid, *descendants(process.pid)}
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            wait_gone(tree)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tandem(
    *args: str, timeout_s: float = 300.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


PLAINLY = "model.dtype=float32", "speculation.profile_at_startup=false"


@contextmanager
def serving(
    *sets: str,
    head: RayHead | None = None,
    command: Sequence[str] = COMMAND,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
) -> Iterator[Serving]:
    """Run ``tandem serve`` during the block, with a local Ray or in ``head``.

    ``env`` is the environment of serve and of its local Ray; None for this process's. Unless
    ``sets`` say otherwise, ranks compute in fp32 and do not profile steps at startup, which saves
    seconds per test.
    """
    first = "server.address=127.0.0.1:0", *PLAINLY
    args = [arg for item in (*first, *sets) for arg in ("--set", item)]
    if head is not None:
        args += ["--ray-address", head.address]
    process = subprocess.Popen(
        [*command, "serve", *args],
        cwd=cwd,
        env=env if head is None else head.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    reader.start()
    try:
        line = process.stdout.readline().strip()
        if not line.startswith("ready grpc="):
            process.wait(30)
            raise AssertionError(f"no ready line but {line!r}; stderr: {''.join(log)}")
        yield Serving(process, line.removeprefix("ready grpc=").split()[0], log)
    finally:
        if process.poll() is None:
            tree = descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            wait_gone(tree)


def parents() -> dict[int, int]:
    """Return the parent of every process that can be read."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                table[int(entry.name)] = int(
                    (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
            except OSError:
                continue
    return table


def descendants(pid: int) -> set[int]:
    table = parents()
    found, frontier = set[int](), {pid}
    while frontier:
        frontier = {child for child, parent in table.items() if parent in frontier} - found
        found |= frontier
    return found


def actors(pid: int, class_name: str) -> list[int]:
    """Return the processes below ``pid`` that are Ray actors of this class, oldest first."""
    title = f"ray::{class_name}".encode()
    return [child for child in sorted(descendants(pid)) if command_of(child).startswith(title)]


def command_of(pid: int) -> bytes:
    """Return the command line; empty if the process has ended since its parent was read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def listening(pids: set[int]) -> list[IPv4Address | IPv6Address]:
    """Return the addresses that these processes listen on, one for each TCP port."""
    held = set[str]()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                held.add(os.readlink(fd))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state, *_, inode = line.split()[1:10]
            if state == "0A" and f"socket:[{inode}]" in held:
                found.append(_address(bytes.fromhex(local.partition(":")[0])))
    return found


def _address(raw: bytes) -> IPv4Address | IPv6Address:
    """Decode an address of the kernel's table: words of four bytes in reverse byte order."""
    found = ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
    return getattr(found, "ipv4_mapped", None) or found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    """Assert that no process of ``pids`` outlives the timeout; kill those that do."""
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"
