"""Commands and clients work in folders whose files are named like parts of Tandem."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import COMMAND, ROOT, python_path, serving
from tandem.core.config import TINY_MODEL

USED = "import tandem; from tandem import Client; print(tandem.__file__)"
IDS = [0, 40, 41]


def make_project(folder: Path) -> Path:
    """Write a project whose modules have names of Tandem's folders and fail when imported."""
    folder.mkdir()
    for name in ("core", "model", "runtime"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('the user owns {name}')\n")
    for name in ("cluster", "text"):
        (folder / f"{name}.py").write_text(f"raise ImportError('the user owns {name}')\n")
    return folder


def make_parent_of_clone(folder: Path) -> Path:
    """Make a folder with a clone of this repository that is called tandem."""
    folder.mkdir()
    (folder / "tandem").symlink_to(ROOT)
    return folder


MADE = {"a project": make_project, "above a clone": make_parent_of_clone}


@pytest.mark.parametrize("kind", MADE)
def test_the_client_is_imported(tmp_path: Path, kind: str) -> None:
    folder = MADE[kind](tmp_path / "folder")
    ran = subprocess.run(
        [sys.executable, "-c", USED], cwd=folder, capture_output=True, text=True, check=True
    )
    assert not Path(ran.stdout.strip()).is_relative_to(folder)


@pytest.mark.parametrize(
    "kind", ["a project", pytest.param("above a clone", marks=pytest.mark.slow)]
)
def test_a_local_cluster_serves(tmp_path: Path, kind: str) -> None:
    """`python -m` puts the working directory before everything else."""
    folder = MADE[kind](tmp_path / "folder")
    with serving("kv.num_pages=200", cwd=folder) as running:
        assert ask(COMMAND, folder, running.address) == 8
        assert running.stop() == 0


def ask(command: tuple[str, ...], folder: Path, address: str) -> int:
    """Return the number of tokens of an answer to `generate`, which are the checkpoint's."""
    ids = ",".join(map(str, IDS))
    args = ("--token-ids", ids, "--max-tokens", "8", "--json", "--address", address)
    done = subprocess.run(
        [*command, "generate", *args], cwd=folder, capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert not near_ties(TINY_MODEL, IDS, answer["token_ids"])
    return len(answer["token_ids"])


def test_a_tree_is_imported_before_an_installed_one(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "src" / "tandem").mkdir(parents=True)
    (tree / "src" / "tandem" / "__init__.py").write_text("print('the tree')\n")
    ran = subprocess.run(
        [sys.executable, "-c", "import tandem"],
        env={"PYTHONPATH": python_path(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "the tree\n"
