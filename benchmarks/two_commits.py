"""Whether a decode step of one commit takes longer than of another: two processes, step by step.

    python -m benchmarks.two_commits BASE [HEAD] [--pairs 10] [--json] [options of decode_step]

Each commit gets a separate worktree in a temporary folder. A pair is two processes that run each
commit's ``benchmarks/decode_step.py`` on its code. Both use this interpreter and its packages. The
default options are ``--rows 1,8,32 --drafts 0,3 --sampling greedy,top-p --arms "recorded bf16"``.

The processes alternate, one step of base and one of head, so that other work affects both. A pair's
ratio is the median of head by base over its steps. Base starts every other pair. Uncommitted
changes are not measured.

Comparing BASE with itself shows the noise of this machine at this time. Look at it first, and take
more pairs until it is within 1.5 %.

``wall`` and ``cpu`` are a step's wall time and the CPU time of all threads. ``outside`` is its wall
time less that of its program. Times are minima over all steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from subprocess import PIPE, Popen

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.harness.procs import ROOT, python_path
from tandem.core.config import TINY_MODEL

DRIVER = "benchmarks/decode_step.py"
USUAL = ("--sampling", "greedy,top-p", "--arms", "recorded bf16", "--rounds", "2")
WARM_UP = ("--rows", "1", "--drafts", "0", "--sampling", "greedy", "--rounds", "1", "--steps", "1")
"""Options of a first turn of each commit that does not count: it compiles kernels and reads
files."""
BASE, HEAD = "base", "head"
Case = tuple[object, ...]
"""Arm, rows, drafts, sampling."""
Turn = dict[Case, dict[str, list[float]]]
"""Figures of decode_step's steps by case."""


class Failed(Exception):
    """An error that the user can fix."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Compared:
    """Ratios are head by base, of pairs; times are the minima over all steps (base, head)."""

    wall: Spread
    cpu: Spread
    wall_ms: tuple[float, float]
    outside_ms: tuple[float, float]

    @property
    def outside(self) -> float:
        base, head = self.outside_ms
        return head / base


def compared(base: Sequence[Turn], head: Sequence[Turn]) -> dict[Case, Compared]:
    """Compare turns. Turn i of base is paired with turn i of head, and so are their steps."""
    found = {}
    for case in base[0]:
        pairs = [(old[case], new[case]) for old, new in zip(base, head, strict=True)]
        ratios = {
            name: [statistics.median(map(truediv, new[name], old[name])) for old, new in pairs]
            for name in ("wall_ms", "cpu_ms")
        }
        least = {
            name: (min(min(old[name]) for old, _ in pairs), min(min(new[name]) for _, new in pairs))
            for name in ("wall_ms", "outside_ms")
        }
        found[case] = Compared(
            Spread.of(ratios["wall_ms"]),
            Spread.of(ratios["cpu_ms"]),
            least["wall_ms"],
            least["outside_ms"],
        )
    return found


def read_turn(line: str) -> Turn:
    """Parse the output of decode_step: figures are in ms, all other fields name the case."""
    turn: Turn = {}
    for one in json.loads(line):
        figures = {name: one.pop(name) for name in list(one) if name.endswith("_ms")}
        turn[tuple(one.values())] = figures
    return turn


def begin(tree: Path, options: Sequence[str], keeps: Sequence[int] = ()) -> "Popen[str]":
    """Start a turn on the code in ``tree``; the descriptors ``keeps`` stay open in its process."""
    command = [
        sys.executable,
        "-P",
        str(tree / DRIVER),
        "--json",
        "--path",
        str(TINY_MODEL),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(tree)}
    return Popen(
        command, cwd=tree, env=environment, stdout=PIPE, stderr=PIPE, text=True, pass_fds=keeps
    )


def turn_of(process: "Popen[str]", tree: Path) -> Turn:
    """Wait for the process and return its turn. Raises Failed with its last line of output."""
    said, words = process.communicate()
    if process.returncode:
        last = words.strip().splitlines() or [f"exit code {process.returncode}"]
        raise Failed(f"decode_step cannot run on {tree.name}: {last[-1]}")
    return read_turn(said)


def run_pair(trees: dict[str, Path], first: str, options: Sequence[str]) -> dict[str, Turn]:
    """Run both processes by turns. Raises Failed with the error of the one that failed by
    itself."""
    pipes = {side: os.pipe() for side in trees}
    os.write(pipes[first][1], b".")
    begun = {}
    for side, other in ((BASE, HEAD), (HEAD, BASE)):
        ends = pipes[side][0], pipes[other][1]
        baton = "--baton", ",".join(map(str, ends))
        begun[side] = begin(trees[side], [*USUAL, *options, *baton], ends)
    for end in [end for pipe in pipes.values() for end in pipe]:
        os.close(end)
    with ThreadPoolExecutor(len(begun)) as pool:
        ended = {side: pool.submit(turn_of, one, trees[side]) for side, one in begun.items()}
    failed = [error for one in ended.values() if (error := one.exception()) is not None]
    if failed:
        raise min(failed, key=lambda error: "EOFError" in str(error))
    return {side: one.result() for side, one in ended.items()}


def commit_of(name: str) -> str:
    """Return the full hash of a commit. Raises Failed if there is none."""
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except Failed:
        raise Failed(f"{name!r} is no commit of this repository") from None


@contextmanager
def worktrees(commits: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Make a worktree for each of ``commits``, by the same names; remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="two-commits-") as folder:
        trees = {side: Path(folder, f"{side}-{commit[:12]}") for side, commit in commits.items()}
        try:
            for side, tree in trees.items():
                _git("worktree", "add", "--detach", "--quiet", str(tree), commits[side])
            yield trees
        finally:
            for tree in filter(Path.exists, trees.values()):
                _git("worktree", "remove", "--force", str(tree))


def _git(*args: str) -> str:
    ran = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        raise Failed(f"git {args[0]}: {ran.stderr.strip()}")
    return ran.stdout.strip()


def measure(
    commits: dict[str, str], num_pairs: int, options: Sequence[str]
) -> dict[Case, Compared]:
    turns: dict[str, list[Turn]] = {BASE: [], HEAD: []}
    with worktrees(commits) as trees:
        for tree in trees.values():
            turn_of(begin(tree, [*USUAL, *options, *WARM_UP]), tree)
        for i in tqdm(range(num_pairs), desc="pairs", file=sys.stderr):
            pair = run_pair(trees, HEAD if i % 2 else BASE, options)
            for side, turn in pair.items():
                turns[side].append(turn)
    return compared(turns[BASE], turns[HEAD])


def show(found: dict[Case, Compared], num_pairs: int) -> Table:
    table = Table(title=f"head / base: median of {num_pairs} pairs (least to most)")
    for name in ("arm", "case", "wall", "cpu", "wall ms", "outside ms", "outside"):
        table.add_column(name, justify="right")
    for (arm, rows, drafts, sampling), one in found.items():
        ratios = (f"{r.median:.3f} ({r.least:.2f} to {r.most:.2f})" for r in (one.wall, one.cpu))
        times = (f"{base:.2f}, {head:.2f}" for base, head in (one.wall_ms, one.outside_ms))
        case = f"{rows} rows, {drafts} drafts, {sampling}"
        table.add_row(str(arm), case, *ratios, *times, f"{one.outside:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("head", metavar="HEAD", nargs="?", default="HEAD")
    parser.add_argument("--pairs", type=int, default=10, help="number of pairs [10]")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args, options = parser.parse_known_args()
    try:
        if args.pairs < 1:
            raise Failed(f"--pairs {args.pairs}: at least 1")
        commits = {BASE: commit_of(args.base), HEAD: commit_of(args.head)}
        found = measure(commits, args.pairs, options)
    except Failed as error:
        parser.exit(2, f"two_commits: {error}\n")
    if args.json:
        cases = [
            {"case": case, "outside": one.outside, **asdict(one)} for case, one in found.items()
        ]
        print(json.dumps({**commits, "pairs": args.pairs, "cases": cases}))
    else:
        Console(width=120).print(show(found, args.pairs))


if __name__ == "__main__":
    main()
