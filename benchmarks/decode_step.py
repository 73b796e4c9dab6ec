"""Time of a decode step for each kind of kernels and form, by rows, drafts and sampling.

    python -m benchmarks.decode_step [--rows 1,8,32] [--drafts 0,3] [--sampling greedy,top-p]
        [--arms "recorded bf16"] [--rounds 4] [--steps 20] [--num-threads 2] [--json]

All arms decode the same held-out prompts of 128 tokens and take turns, so that drift affects them
equally. A step is the work of the engine thread: planning, the tensor program, and reading its
results. Time outside of the program is the host's share.

``benchmarks.two_commits`` runs this file on the code of other commits. So this file may use only
these names of ``benchmarks/harness``:

- ``load``, ``greedy`` and ``Bench`` of ``engines.py``.
- The fields num_drafts, max_rows, num_pages and page_size of ``Bench``.
- Its members start, drop, decode.step, decode.step_s and decode.program_s.
- ``held_out``.

Only the eager arm uses one name more. Other commits do not run that arm.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.harness.engines import Bench, greedy, load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL

EAGER = "eager bf16"
ARMS = {
    "plain fp32": ("model.kernels=torch", "model.dtype=float32"),
    EAGER: ("model.kernels=native", "model.dtype=bfloat16"),
    "recorded fp32": ("model.kernels=native", "model.dtype=float32"),
    "recorded bf16": ("model.kernels=native", "model.dtype=bfloat16"),
}
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "all": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
}
NUM_UNCOUNTED = 2
"""First steps of a turn, which record the program and do not count."""
MOST_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    drafts: int
    sampling: str


@dataclass(frozen=True, slots=True)
class Step:
    """Times in milliseconds: wall time, CPU time of all threads, and wall time outside of the
    program."""

    wall: float
    cpu: float
    outside: float


Steps = dict[Case, dict[str, list[Step]]]
"""Steps by case and arm."""


def benches(
    path: Path, arms: list[str], num_drafts: int, num_threads: int, max_rows: int
) -> dict[str, Bench]:
    more = f"decode.num_threads={num_threads}", f"speculation.max_depth={num_drafts}"
    found = {}
    for name in arms:
        loaded = load(path, *ARMS[name], *more)
        if name == EAGER:
            loaded.dispatch.eager_reason = "to be compared"
        found[name] = Bench(
            loaded,
            num_drafts=num_drafts,
            max_rows=max_rows,
            num_pages=1 + 8 * max_rows,
            page_size=64,
        )
    return found


class Baton(AbstractContextManager[None]):
    """Lets two identical processes run each piece of work by turns.

    ``takes`` and ``gives`` are ends of pipes. Raises EOFError if the other process has ended before
    its turn.
    """

    def __init__(self, takes: int, gives: int) -> None:
        self._takes, self._gives = takes, gives

    def __enter__(self) -> None:
        if not os.read(self._takes, 1):
            raise EOFError("the other process has ended")

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):  # the other process needs no further turn
            os.write(self._gives, b".")


Turns = AbstractContextManager[None]
ALONE: Turns = nullcontext()


def turn(bench: Bench, case: Case, num_steps: int, baton: Turns = ALONE) -> list[Step]:
    more, steps = SAMPLING[case.sampling], []
    with baton:
        for i, ids in enumerate(held_out(case.rows, 128, 129, seed=3)):
            bench.start(greedy(f"r{i}", ids, MOST_TOKENS, ignore_eos=True, **more))
    for _ in range(NUM_UNCOUNTED + num_steps):
        with baton:
            steps.append(timed(bench))
    with baton:
        for i in range(case.rows):
            bench.drop(f"r{i}")
    return steps[NUM_UNCOUNTED:]


def timed(bench: Bench) -> Step:
    engine = bench.decode
    outside_s = engine.step_s - engine.program_s
    wall_at, cpu_at = time.perf_counter(), time.process_time()
    engine.step()
    wall_s, cpu_s = time.perf_counter() - wall_at, time.process_time() - cpu_at
    outside_s = engine.step_s - engine.program_s - outside_s
    return Step(1e3 * wall_s, 1e3 * cpu_s, 1e3 * outside_s)


def lines(steps: Steps) -> Iterator[dict[str, object]]:
    """Return figures of all steps, in the steps' order."""
    for case, by_arm in steps.items():
        for arm, all_steps in by_arm.items():
            figures = {
                f"{name}_ms": [round(getattr(step, name), 4) for step in all_steps]
                for name in Step.__slots__
            }
            yield {"arm": arm, **asdict(case), **figures}


def show(steps: Steps, arms: list[str]) -> Table:
    table = Table(title="ms a step: median (best; CPU time of the best)")
    for column in ("rows", "drafts", "sampling", *arms, "by the first"):
        table.add_column(column, justify="right")
    for case, by_arm in steps.items():
        walls = {name: [step.wall for step in by_arm[name]] for name in arms}
        medians = [statistics.median(walls[name]) for name in arms]
        cpus = [min(step.cpu for step in by_arm[name]) for name in arms]
        figures = [
            f"{median:.1f} ({min(walls[name]):.1f}; {cpu:.1f})"
            for name, median, cpu in zip(arms, medians, cpus, strict=True)
        ]
        ratios = " ".join(f"{median / medians[0]:.2f}" for median in medians[1:])
        table.add_row(str(case.rows), str(case.drafts), case.sampling, *figures, ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY_MODEL, help="checkpoint folder")
    parser.add_argument("--rows", default="1,8,32", metavar="N,N,..")
    parser.add_argument("--drafts", default="0,3", metavar="N,N,..")
    parser.add_argument("--sampling", default="greedy", metavar=",".join(SAMPLING))
    parser.add_argument("--arms", default=",".join(ARMS), metavar="NAME,NAME,..")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every arm")
    parser.add_argument("--steps", type=int, default=20, help="steps of each arm in a turn")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument(
        "--baton", metavar="FD,FD", help="used by two_commits: pipes for taking turns"
    )
    args = parser.parse_args()
    baton = Baton(*map(int, args.baton.split(","))) if args.baton else ALONE
    rows, drafts = ([int(num) for num in text.split(",")] for text in (args.rows, args.drafts))
    arms, sampling = args.arms.split(","), args.sampling.split(",")
    for names, known in ((arms, ARMS), (sampling, SAMPLING)):
        if unknown := set(names) - known.keys():
            parser.error(f"{sorted(unknown)}: choose among {', '.join(known)}")
    if (max(drafts) + 1) * (args.steps + NUM_UNCOUNTED) >= MOST_TOKENS:
        parser.error(f"--steps {args.steps}: rows would end; take fewer")
    steps: Steps = defaultdict(lambda: defaultdict(list))
    with Progress(console=Console(stderr=True)) as bar:
        for num_drafts in drafts:
            with baton:
                by_arm = benches(args.path, arms, num_drafts, args.num_threads, max(rows))
            cases = [Case(num, num_drafts, name) for num in rows for name in sampling]
            for case in bar.track(cases * args.rounds, description=f"{num_drafts} drafts"):
                for name, bench in by_arm.items():
                    steps[case][name] += turn(bench, case, args.steps, baton)
    if args.json:
        print(json.dumps(list(lines(steps))))
    else:
        Console().print(show(steps, arms))


if __name__ == "__main__":
    main()
