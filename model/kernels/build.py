"""The C++ kernels, compiled once for a machine: ``python -m model.kernels.build`` does it ahead."""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from core.user_cache import user_cache

log = logging.getLogger(__name__)
SOURCES = tuple(sorted(Path(__file__).with_name("cpu").glob("*.cpp")))
# NDEBUG as torch itself was built: classes of its headers are laid out by it.
FLAGS = (
    "-O3",
    "-DNDEBUG",
    "-march=native",
    "-std=c++20",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10")


def built() -> Path:
    """The library, compiled now if this source, torch, compiler and processor never were; another
    process that does the same is waited for.

    Raises ValueError saying what is missing, or what the compiler said.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ValueError("no C++ compiler; install g++, or name one in CXX")
    library = _cache() / f"{_key(compiler)}.so"
    if not library.exists():
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, library)
    return library


def _cache() -> Path:
    folder = user_cache() / "tandem" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, library: Path) -> None:
    made = library.with_suffix(f".{os.getpid()}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    given = [*map(str, SOURCES), *paths, *LIBRARIES]
    command = ["nice", compiler, *FLAGS, abi, *given, "-o", str(made)]
    log.warning("compiling kernels, once for this machine: half a minute or so")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{compiler} cannot compile kernels: {done.stderr[:2000]}")
    made.rename(library)


if __name__ == "__main__":
    print(built())
