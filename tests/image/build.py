"""Build the image with the README's command, from the package registries of this machine."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.harness.procs import ROOT

BASE = "python:3.11-slim-bookworm"
STAND_IN = "Debian bookworm with its own Python 3.11: no registry of images can be reached"
CERTIFICATES = Path("/etc/ssl/certs")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYPI = "https://pypi.org/simple"


def run(*command: str, quiet: bool = True, environ: Mapping[str, str] = {}) -> str:
    """Return the command's stdout. Raises RuntimeError with the command's output."""
    env = os.environ | environ
    done = subprocess.run(command, cwd=ROOT, capture_output=quiet, text=True, env=env)
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}"[-4000:] if quiet else ""
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{said}")
    return done.stdout or ""


def find_base() -> str:
    """Choose the base image of deploy/Containerfile, and print which one it is."""
    if _is_there(BASE):
        told = '{{index .OCIv1.Config.Labels "is"}}'
        return run("buildah", "inspect", "--format", told, BASE).strip() or BASE
    try:
        run("buildah", "pull", f"docker.io/library/{BASE}")
        return BASE
    except RuntimeError:
        _make_stand_in()
        return STAND_IN


def _is_there(image: str) -> bool:
    return subprocess.run(["buildah", "inspect", image], capture_output=True).returncode == 0


def _make_stand_in() -> None:
    with TemporaryDirectory() as name:
        root, packed = Path(name, "root"), Path(name, "root.tar")
        packages = "--include=python3.11,python3-pip,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", packages, "bookworm", str(root))
        (root / "usr/bin/python").symlink_to("python3.11")
        # Debian's marker file makes pip refuse to install into the system's Python.
        (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
        with tarfile.open(packed, "w") as tar:
            tar.add(root, ".")
        working = run("buildah", "from", "scratch").strip()
        run("buildah", "add", working, str(packed), "/")
        run("buildah", "config", "--label", f"is={STAND_IN}", working)
        run("buildah", "commit", "--rm", working, BASE)


def build(arguments: Sequence[str]) -> None:
    """Run ``docker build`` with these arguments and this machine's pip configuration."""
    how = "--isolation", "chroot", "--network", "host", "--pull-never", "--layers"
    run("buildah", "bud", *how, *_as_pip_here(), *arguments, quiet=False)


def _as_pip_here() -> list[str]:
    """Return pip's index, folders of wheels and certificates as arguments of a build."""
    told = dict(
        line.partition("=")[::2]
        for line in run(sys.executable, "-m", "pip", "config", "list").splitlines()
    )
    asked = {key.rpartition(".")[2]: value.strip("'") for key, value in told.items()}
    index = asked.get("index-url", PYPI)
    args = {"PIP_INDEX_URL": index}
    mounted = [Path(one) for one in asked.get("find-links", "").split() if Path(one).is_dir()]
    if mounted:
        args["PIP_FIND_LINKS"] = " ".join(map(str, mounted))
    if not answers(f"{TORCH_CPU_INDEX}/torch/"):
        args["TORCH_CPU_INDEX"] = index
    if "cert" in asked:
        mounted.append(CERTIFICATES)
    found = [f"--build-arg={name}={value}" for name, value in args.items()]
    return found + [f"--volume={path}:{path}:ro" for path in mounted]


def answers(address: str) -> bool:
    try:
        # time: a registry that does not answer by then is not there
        with urlopen(address, timeout=10):
            return True
    except (URLError, TimeoutError):
        return False


def size_bytes(image: str) -> int:
    return int(run("podman", "image", "inspect", "--format", "{{.Size}}", image))
