"""A `tandem serve` of one's own as a process, and whether it left any process behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass
class Serving:
    """``address`` is HOST:PORT; ``log`` collects stderr."""

    process: subprocess.Popen[str]
    address: str
    log: list[str] = field(default_factory=list)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then its exit code; asserts that its whole process tree is gone."""
        tree = descendants(self.process.pid)
        assert len(tree) > 2, "Ray's processes should be below the server"
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        wait_gone(tree)
        return code


def tandem(*args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def serving(*sets: str) -> Iterator[Serving]:
    """``tandem serve`` until the block ends; it is ended by id whatever happens."""
    args = [arg for item in ("server.address=127.0.0.1:0", *sets) for arg in ("--set", item)]
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", *args],
        cwd=ROOT,
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
        yield Serving(process, line.removeprefix("ready grpc="), log)
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
    """Parent of every process that can be read."""
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
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in table.items() if parent in frontier} - found
        found |= frontier
    return found


def actors(pid: int, class_name: str) -> list[int]:
    """Below ``pid``, the processes of Ray actors of this class, oldest first."""
    title = f"ray::{class_name}".encode()
    return [
        child
        for child in sorted(descendants(pid))
        if Path(f"/proc/{child}/cmdline").read_bytes().startswith(title)
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: set[int], timeout_s: float = 20.0) -> None:
    """Assert that none of ``pids`` outlives the timeout; end those that do."""
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"
