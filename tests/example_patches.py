"""Apply the patches in tests/extension_examples/, each of which adds a part to Tandem.

A patch adds a line that registers the part, and at most one new file. Tests apply each patch to a
copy of the tree and use the part there. So what docs/structure.md says about where a part goes
stays true. The tree itself is never changed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.procs import python_path
from tests.sizes import PRODUCT, ROOT

PATCHES = Path(__file__).with_name("extension_examples")
NEEDED = (*PRODUCT, "tests")
"""Folders that a copy needs; checkpoints are read from the original tree."""


@dataclass(frozen=True)
class Counted:
    """Effect of a patch: the files that it creates, and the lines added to and removed from
    others."""

    created: tuple[str, ...]
    num_added: int
    num_removed: int


def plant(name: str, tree: Path, folders: Sequence[str] = NEEDED) -> Counted:
    """Copy ``folders`` into ``tree`` and apply the patch ``name``.

    Raises:
        ValueError: The patch no longer applies, or needs more than one new file and one line.
    """
    for folder in folders:
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True)
    counted = apply(PATCHES / f"{name}.patch", tree)
    if len(counted.created) > 1 or (counted.num_added, counted.num_removed) != (1, 0):
        raise ValueError(f"{name}: {counted} is more than one new file and one line")
    return counted


def apply(patch: Path, tree: Path) -> Counted:
    """Apply a patch and count its changes. Raises ValueError if it does not apply."""
    summary = [line.split() for line in _git_apply(patch, tree, "--summary").splitlines()]
    created = tuple(words[-1] for words in summary if words[0] == "create")
    changed = [line.split("\t") for line in _git_apply(patch, tree, "--numstat").splitlines()]
    counts = [(int(added), int(removed)) for added, removed, file in changed if file not in created]
    _git_apply(patch, tree)
    return Counted(
        created, sum(added for added, _ in counts), sum(removed for _, removed in counts)
    )


def run(tree: Path, module: str, *args: str) -> str:
    """Run ``python -m module`` in ``tree`` with the tree's own modules and return its output.
    Raises AssertionError with the output if it fails."""
    env = os.environ | {"PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *args]
    ran = subprocess.run(
        command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def _git_apply(patch: Path, tree: Path, *options: str) -> str:
    """Run ``git apply`` in ``tree``, also if a parent folder is a repository."""
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(patch)]
    ran = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if ran.returncode:
        raise ValueError(f"{patch.name} does not apply: {ran.stderr.strip()}")
    return ran.stdout
