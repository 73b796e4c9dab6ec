"""Compile the C++ kernels, once for a machine; ``python -m tandem.model.kernels.build`` does it
ahead."""

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

from tandem.core.pace import on_start
from tandem.core.user_cache import own_bytes, private_folder, user_cache

log = logging.getLogger(__name__)
SOURCES = tuple(sorted(Path(__file__).with_name("cpu").glob("*.cpp")))
# NDEBUG as torch itself was built: classes of its headers are laid out by it.
FLAGS = (
    *("-O3", "-DNDEBUG", "-march=native", "-std=c++20", "-pthread", "-fPIC", "-shared"),
    "-Wno-psabi",
)
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10")
NEWS_S = 1.0
NOTE_BYTES = 64
DIGEST = ".sha256"
"""Suffix of the file that holds the digest of a library."""


def built() -> Path:
    """Return the library for this source, torch, compiler and processor, and compile it first if
    that has never been done.

    Waits for another process that is compiling the same library. Either way ``on_start``
    (core/pace.py) gets the CPU seconds that the compiler has used.

    Raises:
        ValueError: There is no compiler, or the compiler failed; the message has its output.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ValueError("no C++ compiler; install g++, or name one in CXX")
    folder = private_folder(user_cache() / "tandem" / "kernels")
    library = folder / f"{_key(compiler)}.so"
    if not _is_whole(library):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(library.with_suffix(".lock"), flags, 0o600), "rb+") as lock:
            _wait_for(lock)
            if not _is_whole(library):
                _compile(compiler, library, lock)
    return library


def _is_whole(library: Path) -> bool:
    """Return whether a library is this user's and has the digest that was noted beside it.

    One that was cut short would end the process by SIGBUS when it is loaded.
    """
    code, noted = own_bytes(library), own_bytes(library.with_suffix(DIGEST))
    return code is not None and noted == hashlib.sha256(code).hexdigest().encode()


def _keep(made: Path, target: Path) -> None:
    """Give a file its name when its bytes are on the disk."""
    made.chmod(0o600)
    with made.open("rb") as file:
        os.fsync(file)
    made.rename(target)


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    folders = {source.parent for source in SOURCES}
    texts = [file.read_text() for folder in folders for file in sorted(folder.glob("*.*"))]
    told = (torch.__version__, FLAGS, platform.machine(), _processor(), version, texts)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _processor() -> str:
    """What it can do, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _wait_for(lock: IO[bytes]) -> None:
    """Whoever holds it notes in it who that is, and how long the compiler has computed."""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, seconds = os.pread(lock.fileno(), NOTE_BYTES, 0).decode().split() or ("?", 0)
            on_start.get()(f"waiting for process {pid}, which compiles kernels", float(seconds))
            time.sleep(NEWS_S)


def _compile(compiler: str, library: Path, lock: IO[bytes]) -> None:
    made = library.with_suffix(f".{os.getpid()}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    given = [*map(str, SOURCES), *paths, *LIBRARIES]
    command = ["nice", compiler, *FLAGS, abi, *given, "-o", str(made)]
    log.warning("compiling kernels, once for this machine: half a minute or so")
    told: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **told) as process:
        said = None
        while said is None:
            seconds = _computed_s(process.pid)
            note = f"{os.getpid()} {seconds}".ljust(NOTE_BYTES)
            os.pwrite(lock.fileno(), note.encode(), 0)
            on_start.get()("compiling kernels", seconds)
            with suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=NEWS_S)[0]
    if process.returncode != 0:
        raise ValueError(f"{compiler} cannot compile kernels: {said[:2000]}")
    digest = made.with_name(f"{made.name}{DIGEST}")
    digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
    _keep(digest, library.with_suffix(DIGEST))
    _keep(made, library)


def _computed_s(pid: int) -> float:
    """By a process and all below it; where no kernel tells, the time of day."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return time.monotonic()
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(_computed_s(int(child)) for child in below)


if __name__ == "__main__":
    print(built())
