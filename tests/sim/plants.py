"""Reintroduce fixed bugs one by one: the simulation has to find each of them.

``python -m tests.sim.plants [NAME ...]`` applies each entry of plants.toml alone to a copy of the
tree, and runs the seed that is known to find it. ``--search N`` runs N seeds instead, from EDGES
on, and prints the first one that finds it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.procs import python_path
from tests.mutants import copy_tree
from tests.sim.mix import EDGES

DATA = Path(__file__).with_name("plants.toml")


@dataclass(frozen=True)
class Edit:
    """Replaces ``before``, which occurs exactly once in ``file``, by ``after``."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Plant:
    """A bug as ``edits``. ``seed`` is known to find it, ``breaks`` describes its effect."""

    name: str
    breaks: str
    seed: int
    edits: Sequence[Edit]

    def changed(self, tree: Path) -> dict[str, str]:
        """Return the new text of each file. Raises ValueError if an edit does not apply."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file) or (tree / edit.file).read_text()
            if (num := text.count(edit.before)) != 1:
                raise ValueError(
                    f"{self.name}: {edit.file} has {num} times {edit.before!r}, not once"
                )
            texts[edit.file] = text.replace(edit.before, edit.after)
            compile(texts[edit.file], edit.file, "exec")
        return texts


def read(data: Path = DATA) -> list[Plant]:
    """Return all of plants.toml."""
    tables = tomllib.loads(data.read_text())["plant"]
    edits = [[Edit(**edit) for edit in table.pop("edit")] for table in tables]
    return [Plant(**table, edits=own) for table, own in zip(tables, edits, strict=True)]


def try_out(plant: Plant, tree: Path, *options: str) -> str:
    """Run the simulation with the bug in ``tree``; return the failures, "" if there are none."""
    texts = plant.changed(tree)
    before = {file: (tree / file).read_text() for file in texts}
    for file, text in texts.items():
        (tree / file).write_text(text)
    try:
        command = [sys.executable, "-m", "tests.sim", *options]
        ran = subprocess.run(command, cwd=tree, env=_env(tree), capture_output=True, text=True)
    finally:
        for file, text in before.items():
            (tree / file).write_text(text)
    if ran.returncode not in (0, 1):
        raise ValueError(f"{plant.name}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout if ran.returncode else ""


def _env(tree: Path) -> dict[str, str]:
    """Return an environment in which every process imports the modules of ``tree``."""
    return os.environ | {"PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.plants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of plants [all]")
    parser.add_argument("--search", type=int, help="as many seeds instead of the known one")
    args = parser.parse_args()
    plants = [plant for plant in read() if not args.names or plant.name in args.names]
    num_missed = 0
    with tempfile.TemporaryDirectory(prefix="plants") as folder:
        copy_tree(Path(folder))
        for plant in plants:
            options = ["--seed", str(plant.seed)]
            if args.search:
                options = ["--first", str(EDGES), "--seeds", str(args.search), "--stop"]
            failure = try_out(plant, Path(folder), *options)
            num_missed += not failure
            found = [line for line in failure.splitlines() if line][:2]
            print(f"{'found' if found else 'MISSED'}  {plant.name}: {' '.join(found)}", flush=True)
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
