"""The command that measures two commits in turns: its order, its figures, and one real run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_commits import BASE, HEAD, ROOT, Failed, commit_of, compared, order, read_turn

CASE = ("recorded bf16", 1, 0, "greedy")


def turn(wall: float, cpu: float = 1.0, outside: float = 1.0) -> dict:
    return {CASE: {"wall_ms": wall, "cpu_ms": cpu, "outside_ms": outside}}


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "benchmarks.two_commits", *args]
    environment = {**os.environ, **environment}
    return subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_each_commit_goes_first_in_every_other_pair() -> None:
    assert order(3) == [BASE, HEAD, HEAD, BASE, BASE, HEAD]
    assert order(10).count(BASE) == order(10).count(HEAD) == 10


def test_drift_that_hits_both_of_a_pair_is_in_no_ratio() -> None:
    base = [turn(10.0, 5.0), turn(100.0, 50.0), turn(20.0, 10.0)]
    head = [turn(11.0, 5.0), turn(100.0, 60.0), turn(24.0, 10.0)]
    wall, cpu = compared(base, head)[CASE].wall, compared(base, head)[CASE].cpu
    assert (wall.median, wall.least, wall.most) == (1.1, 1.0, 1.2)
    assert (cpu.median, cpu.most) == (1.0, 1.2)


def test_times_are_the_best_of_all_turns() -> None:
    base = [turn(10.0, outside=0.5), turn(8.0, outside=0.4)]
    head = [turn(9.0, outside=0.3), turn(12.0, outside=0.6)]
    found = compared(base, head)[CASE]
    assert found.wall_ms == (8.0, 9.0)
    assert found.outside_ms == (0.4, 0.3) and found.outside == pytest.approx(0.75)


def test_what_the_benchmark_prints_is_read_by_case() -> None:
    line = {"arm": "recorded bf16", "rows": 1, "drafts": 0, "sampling": "greedy"}
    assert read_turn(json.dumps([{**line, "wall_ms": 1.5, "cpu_ms": 2.5}])) == {
        CASE: {"wall_ms": 1.5, "cpu_ms": 2.5}
    }


def test_an_unknown_commit_is_told() -> None:
    with pytest.raises(Failed, match="'nothing-of-this-name' is no commit"):
        commit_of("nothing-of-this-name")
    with pytest.raises(Failed, match="'--all' is no commit"):
        commit_of("--all")


@pytest.mark.slow
def test_a_commit_beside_itself(tmp_path: Path) -> None:
    sizes = "--rows", "1", "--drafts", "0", "--sampling", "greedy", "--steps", "2"
    ran = command("HEAD", "HEAD", "--pairs", "2", "--json", *sizes, TMPDIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["base"] == told["head"] and told["pairs"] == 2
    (case,) = told["cases"]
    assert tuple(case["case"]) == CASE
    assert all(ms > 0 for ms in (*case["wall_ms"], *case["outside_ms"]))
    assert case["wall"]["least"] <= case["wall"]["median"] <= case["wall"]["most"]
    assert "turns: 100%" in ran.stderr
    left = subprocess.check_output(["git", "worktree", "list"], cwd=ROOT, text=True)
    assert str(tmp_path) not in left and not list(tmp_path.glob("two-commits-*"))


@pytest.mark.slow
def test_an_option_that_the_benchmark_lacks_is_told() -> None:
    ran = command("HEAD", "--no-such-option")
    assert ran.returncode == 2
    assert "unrecognized arguments: --no-such-option" in ran.stderr
