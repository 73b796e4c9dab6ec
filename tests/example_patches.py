"""Patches in tests/extension_examples/ that each add a part to Tandem: a line that registers it,
and a new file, or none.

Tests apply them to a copy of the tree and use the part there, so that what docs/structure.md says
of where a part goes stays true. Nothing is planted in the tree itself.
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
"""Folders that a part is tried with; checkpoints are read where they are."""


@dataclass(frozen=True)
class Counted:
    """What a patch does: the files that it creates, the lines added to and taken from others."""

    created: tuple[str, ...]
    num_added: int
    num_removed: int


def plant(name: str, tree: Path, folders: Sequence[str] = NEEDED) -> Counted:
    """Copy ``folders`` into ``tree`` and apply the patch of that name. Raises ValueError if it does
    not apply any more, or costs more than one new file and one line."""
    for folder in folders:
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True)
    counted = apply(PATCHES / f"{name}.patch", tree)
    if len(counted.created) > 1 or (counted.num_added, counted.num_removed) != (1, 0):
        raise ValueError(f"{name}: {counted} is more than one new file and one line")
    return counted


def apply(patch: Path, tree: Path) -> Counted:
    """Raises ValueError if it cannot be applied."""
    summary = [line.split() for line in _git_apply(patch, tree, "--summary").splitlines()]
    created = tuple(words[-1] for words in summary if words[0] == "create")
    changed = [line.split("\t") for line in _git_apply(patch, tree, "--numstat").splitlines()]
    counts = [(int(added), int(removed)) for added, removed, file in changed if file not in created]
    _git_apply(patch, tree)
    return Counted(
        created, sum(added for added, _ in counts), sum(removed for _, removed in counts)
    )


def run(tree: Path, module: str, *args: str) -> str:
    """What ``python -m module`` prints in ``tree``, with the tree's own modules. Raises
    AssertionError with it if it fails."""
    env = os.environ | {"PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *args]
    ran = subprocess.run(
        command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def _git_apply(patch: Path, tree: Path, *options: str) -> str:
    """In ``tree`` alone, also where a folder above it is a repository."""
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(patch)]
    ran = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if ran.returncode:
        raise ValueError(f"{patch.name} does not apply: {ran.stderr.strip()}")
    return ran.stdout
