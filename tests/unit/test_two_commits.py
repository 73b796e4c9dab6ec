"""The command that measures two commits step by step: its order, its figures, and one real run."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.decode_step import Baton
from benchmarks.two_commits import ROOT, Failed, commit_of, compared, read_turn

CASE = ("recorded bf16", 1, 0, "greedy")


def turn(wall: list[float], cpu: float = 1.0, outside: float = 1.0) -> dict:
    num = len(wall)
    return {CASE: {"wall_ms": wall, "cpu_ms": [cpu] * num, "outside_ms": [outside] * num}}


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "benchmarks.two_commits", *args]
    environment = {**os.environ, **environment}
    return subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_drift_that_hits_both_of_a_step_is_in_no_ratio() -> None:
    base = [turn([10.0, 90.0, 10.0], 5.0), turn([100.0], 50.0), turn([20.0], 10.0)]
    head = [turn([11.0, 99.0, 70.0], 5.0), turn([100.0], 60.0), turn([24.0], 10.0)]
    wall, cpu = compared(base, head)[CASE].wall, compared(base, head)[CASE].cpu
    assert (wall.median, wall.least, wall.most) == (1.1, 1.0, 1.2)
    assert (cpu.median, cpu.most) == (1.0, 1.2)


def test_times_are_the_least_of_all_steps() -> None:
    base = [turn([10.0, 12.0], outside=0.5), turn([9.0, 8.0], outside=0.4)]
    head = [turn([9.0, 9.5], outside=0.3), turn([12.0, 13.0], outside=0.6)]
    found = compared(base, head)[CASE]
    assert found.wall_ms == (8.0, 9.0)
    assert found.outside_ms == (0.4, 0.3) and found.outside == pytest.approx(0.75)


def test_what_the_benchmark_prints_is_read_by_case() -> None:
    line = {"arm": "recorded bf16", "rows": 1, "drafts": 0, "sampling": "greedy"}
    assert read_turn(json.dumps([{**line, "wall_ms": [1.5], "cpu_ms": [2.5]}])) == {
        CASE: {"wall_ms": [1.5], "cpu_ms": [2.5]}
    }


def test_two_processes_do_each_piece_in_turns() -> None:
    """Two processes take turns at each piece, and one that is left alone reports it."""
    pipes = os.pipe(), os.pipe()
    first, second = Baton(pipes[0][0], pipes[1][1]), Baton(pipes[1][0], pipes[0][1])
    done: list[str] = []

    def work(name: str, baton: Baton, num: int) -> None:
        for i in range(num):
            with baton:
                done.append(f"{name}{i}")

    os.write(pipes[0][1], b".")
    other = threading.Thread(target=work, args=("b", second, 3))
    other.start()
    work("a", first, 3)
    other.join()
    assert done == ["a0", "b0", "a1", "b1", "a2", "b2"]
    with first:
        os.close(pipes[0][1])
    with pytest.raises(EOFError):
        first.__enter__()
    for end in (pipes[0][0], *pipes[1]):
        os.close(end)


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
    assert "pairs: 100%" in ran.stderr
    left = subprocess.check_output(["git", "worktree", "list"], cwd=ROOT, text=True)
    assert str(tmp_path) not in left and not list(tmp_path.glob("two-commits-*"))


@pytest.mark.slow
def test_an_option_that_the_benchmark_lacks_is_told() -> None:
    ran = command("HEAD", "--no-such-option")
    assert ran.returncode == 2
    assert "unrecognized arguments: --no-such-option" in ran.stderr
