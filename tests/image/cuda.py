"""Check that the packages of the ``cuda`` target are compatible, on a machine without a GPU.

pip resolves the packages that the target's commands install, and installs nothing.
"""

import json
import os
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.utils import canonicalize_name

from benchmarks.harness.procs import ROOT
from tests.deployed import DEPLOY
from tests.image.build import PYPI, run

CONSTRAINTS = DEPLOY / "constraints.txt"
# A mirror with CPU builds would resolve to different packages.
ENVIRON = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": PYPI}


def resolved() -> dict[str, str]:
    """Return name and version of all packages. Raises RuntimeError with pip's output if they
    conflict."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with TemporaryDirectory() as name:
        report = Path(name, "report.json")
        # fast-deps reads the requirements of a wheel without downloading gigabytes.
        how = "--use-feature=fast-deps", "--dry-run", "--ignore-installed", "--only-binary=:all:"
        told = "--constraint", str(CONSTRAINTS), "--report", str(report), "--quiet"
        pip = sys.executable, "-m", "pip", "install"
        run(*pip, *how, *told, "ray[default]", *project["dependencies"], environ=ENVIRON)
        found = json.loads(report.read_text())["install"]
    packages = (one["metadata"] for one in found)
    return {canonicalize_name(one["name"]): one["version"] for one in packages}


def check() -> int:
    """Return the number of packages. Check that each is pinned and that Triton and CUDA's libraries
    are among them."""
    found = resolved()
    pinned = {
        line.partition("==")[0]
        for line in CONSTRAINTS.read_text().splitlines()
        if not line.startswith("#")
    }
    assert found.keys() <= pinned, found.keys() - pinned
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= found.keys(), found
    return len(found)
