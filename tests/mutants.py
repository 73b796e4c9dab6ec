"""One-line mistakes that keep answers right, each of which a test has to notice.

``python -m tests.mutants [NAME ...]`` applies each mutant of mutants.toml, alone, to a copy of the
tree. It runs the test that is named there and reports caught or missed. Before that, these tests
must pass on the unchanged copy. To add a mutant, add a table to mutants.toml.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.procs import python_path
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_name("mutants.toml")
FAILED = 1
"""pytest's exit code when tests have run and at least one has failed."""
TIMEOUT_S = 120
"""Bound on one test; a mutant that hangs counts as caught."""
HURRY_S = 30.0
"""Replaces PATIENCE_S in the copy: each test runs alone there."""


@dataclass(frozen=True)
class Mutant:
    """A mistake: ``after`` replaces ``before``, which occurs exactly once in ``file``. ``breaks``
    says what stops working, and ``test`` (pytest ids, separated by spaces) must fail."""

    name: str
    file: str
    before: str
    after: str
    breaks: str
    test: str

    def check(self, tree: Path) -> None:
        """Raise ValueError if the mutant cannot be applied to this tree."""
        text = (tree / self.file).read_text()
        if (num := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {num} times {self.before!r}, not once")
        if self.file.endswith(".py"):
            compile(text.replace(self.before, self.after), self.file, "exec")
        for test in self.test.split():
            path, _, function = test.partition("::")
            if f"def {function.partition('[')[0]}(" not in (tree / path).read_text():
                raise ValueError(f"{self.name}: there is no {test}")

    def apply(self, tree: Path) -> None:
        file = tree / self.file
        file.write_text(file.read_text().replace(self.before, self.after))


def read(data: Path = DATA) -> list[Mutant]:
    return [Mutant(**fields) for fields in tomllib.loads(data.read_text())["mutant"]]


def copy_tree(target: Path) -> None:
    """Copy tracked files and new files that git does not ignore, with PATIENCE_S lowered to
    HURRY_S."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(
        b"\0"
    ):
        source = ROOT / os.fsdecode(name)
        if name and (source.is_file() or source.is_symlink()):
            copied = target / os.fsdecode(name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied, follow_symlinks=False)
    waiting = target / "tests" / "waiting.py"
    text = waiting.read_text().replace(f"PATIENCE_S = {PATIENCE_S}", f"PATIENCE_S = {HURRY_S}")
    waiting.write_text(text)


def run(tree: Path, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run tests on the tree's own modules, which precede an installed tandem in every process."""
    env = os.environ | {"PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ("-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def failure_of(mutant: Mutant, tree: Path) -> str:
    """Return the error of the mutant's test ("" if it was missed). Raises ValueError if the test
    did not run."""
    before = (tree / mutant.file).read_text()
    mutant.apply(tree)
    try:
        ran = run(tree, mutant.test.split())
    finally:
        (tree / mutant.file).write_text(before)
    if ran.returncode not in (0, FAILED):
        raise ValueError(f"{mutant.name}: pytest ended with {ran.returncode}\n{ran.stdout}")
    if ran.returncode == 0:
        return ""
    told = [line[1:].strip() for line in ran.stdout.splitlines() if line.startswith("E  ")]
    return next(iter(told), "it hangs")


def try_all(mutants: Sequence[Mutant], tree: Path) -> list[Mutant]:
    """Return the missed mutants. Raises ValueError if the tests fail without a mutant."""
    for mutant in mutants:
        mutant.check(tree)
    ran = run(tree, dict.fromkeys(test for mutant in mutants for test in mutant.test.split()))
    if ran.returncode:
        raise ValueError(f"the tests fail without a mutant\n{ran.stdout}")
    missed = []
    for mutant in mutants:
        began = time.monotonic()
        failure = failure_of(mutant, tree)
        verdict = "caught" if failure else "MISSED"
        print(f"{verdict}  {mutant.name} ({time.monotonic() - began:.0f} s): {mutant.test}")
        print(f"        {failure or mutant.breaks}", flush=True)
        if not failure:
            missed.append(mutant)
    return missed


def main(names: Sequence[str]) -> int:
    mutants = [mutant for mutant in read() if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy_tree(Path(folder))
        missed = try_all(mutants, Path(folder))
    print(f"{len(mutants) - len(missed)} of {len(mutants)} caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
