"""Compiles the C++ kernels, once per machine.

``python -m tandem.model.kernels.build`` compiles them in advance.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tandem.core.progress import on_startup_progress
from tandem.core.user_cache import ensure_private_folder, read_private_file, user_cache

log = logging.getLogger(__name__)
SOURCES = tuple(sorted(Path(__file__).with_name("cpu").glob("*.cpp")))
# NDEBUG must match torch's own build, because the layout of classes in its headers depends on it.
FLAGS = (
    *("-O3", "-DNDEBUG", "-march=native", "-std=c++20", "-pthread", "-fPIC", "-shared"),
    "-Wno-psabi",
)
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10")
PROGRESS_INTERVAL_S = 1.0
NOTE_BYTES = 64
DIGEST_SUFFIX = ".sha256"
"""Suffix of the file with the digest of a library."""


def build_library() -> Path:
    """Return the library for this source, torch, compiler and processor; compile it if missing.

    Waits if another process is compiling the same library. In both cases the compiler's CPU seconds
    are reported to ``on_startup_progress`` (core/progress.py).

    Raises:
        ValueError: There is no compiler, or the compiler failed; the message has its output.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ValueError("no C++ compiler; install g++, or name one in CXX")
    folder = ensure_private_folder(user_cache() / "tandem" / "kernels")
    library = folder / f"{_library_key(compiler)}.so"
    if not _is_intact(library):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(library.with_suffix(".lock"), flags, 0o600), "rb+") as lock:
            _lock_reporting_progress(lock)
            if not _is_intact(library):
                _compile(compiler, library, lock)
    return library


def _is_intact(library: Path) -> bool:
    """Return whether a library belongs to this user and matches the digest in its digest file.

    Loading a truncated library would kill the process with SIGBUS.
    """
    code = read_private_file(library)
    noted = read_private_file(library.with_suffix(DIGEST_SUFFIX))
    return code is not None and noted == hashlib.sha256(code).hexdigest().encode()


def _publish(built: Path, target: Path) -> None:
    """Rename a file to its final name after its bytes are on disk."""
    built.chmod(0o600)
    with built.open("rb") as file:
        os.fsync(file)
    built.rename(target)


def _library_key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    folders = {source.parent for source in SOURCES}
    texts = [file.read_text() for folder in folders for file in sorted(folder.glob("*.*"))]
    inputs = (torch.__version__, FLAGS, platform.machine(), _cpu_features(), version, texts)
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """Return the processor's feature flags, "" if the system does not list them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _lock_reporting_progress(lock: IO[bytes]) -> None:
    """Acquire ``lock``, and report the holder's progress while waiting.

    The holder writes its process id and the compiler's CPU seconds into the lock file.
    """
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, seconds = os.pread(lock.fileno(), NOTE_BYTES, 0).decode().split() or ("?", 0)
            on_startup_progress.get()(
                f"waiting for process {pid}, which compiles kernels", float(seconds)
            )
            time.sleep(PROGRESS_INTERVAL_S)


def _compile(compiler: str, library: Path, lock: IO[bytes]) -> None:
    built = library.with_suffix(f".{os.getpid()}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    arguments = [*map(str, SOURCES), *paths, *LIBRARIES]
    command = ["nice", compiler, *FLAGS, abi, *arguments, "-o", str(built)]
    log.warning("compiling kernels: takes about half a minute, once per machine")
    inputs: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **inputs) as process:
        output = None
        while output is None:
            seconds = _cpu_s(process.pid)
            note = f"{os.getpid()} {seconds}".ljust(NOTE_BYTES)
            os.pwrite(lock.fileno(), note.encode(), 0)
            on_startup_progress.get()("compiling kernels", seconds)
            with suppress(subprocess.TimeoutExpired):
                output = process.communicate(timeout=PROGRESS_INTERVAL_S)[0]
    if process.returncode != 0:
        raise ValueError(f"{compiler} cannot compile kernels: {output[:2000]}")
    digest = built.with_name(f"{built.name}{DIGEST_SUFFIX}")
    digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
    _publish(digest, library.with_suffix(DIGEST_SUFFIX))
    _publish(built, library)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants. Without /proc, return a clock's time
    instead, which increases too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return time.monotonic()
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(_cpu_s(int(child)) for child in below)


if __name__ == "__main__":
    print(build_library())
