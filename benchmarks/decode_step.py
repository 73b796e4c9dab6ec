"""Time of a decode step with each kind of kernels and in each form, by rows and drafts.

    python -m benchmarks.decode_step [--rows 1,8,32] [--drafts 0,3] [--num-threads 2] [--json]

All arms decode the same held-out prompts of 128 tokens and take turns, so that drift hits them
alike. A step is what the engine thread does for it: planning, the tensor program, reading.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.accepted_length import TINY
from benchmarks.driven.engines import Bench, greedy, load
from benchmarks.driven.held_out import held_out

EAGER = "eager bf16"
ARMS = {
    "plain fp32": ("model.kernels=plain", "model.dtype=float32"),
    EAGER: ("model.kernels=native", "model.dtype=bfloat16"),
    "recorded fp32": ("model.kernels=native", "model.dtype=float32"),
    "recorded bf16": ("model.kernels=native", "model.dtype=bfloat16"),
}
NUM_STEPS = 20
"""Of each arm in a turn, after two that do not count."""
Times = dict[tuple[int, int], dict[str, list[float]]]
"""Milliseconds of steps, by (rows, drafts) and arm."""


def benches(path: Path, num_drafts: int, num_threads: int, max_rows: int) -> dict[str, Bench]:
    more = f"decode.num_threads={num_threads}", f"speculation.num_tokens={num_drafts}"
    loaded = {name: load(path, *sets, *more) for name, sets in ARMS.items()}
    loaded[EAGER].dispatch.why_eager = "to be compared"
    return {
        name: Bench(
            one, num_drafts=num_drafts, max_rows=max_rows, num_pages=1 + 8 * max_rows, page_size=64
        )
        for name, one in loaded.items()
    }


def turn(bench: Bench, num_rows: int) -> list[float]:
    for i, ids in enumerate(held_out(num_rows, 128, 129, seed=3)):
        bench.start(greedy(f"r{i}", ids, 200, ignore_eos=True))
    times = []
    for _ in range(NUM_STEPS + 2):
        began_at = time.perf_counter()
        bench.decode.step()
        times.append(1e3 * (time.perf_counter() - began_at))
    for i in range(num_rows):
        bench.drop(f"r{i}")
    return times[2:]


def show(times: Times) -> Table:
    table = Table(title="ms a step: median (best)")
    for column in ("rows", "drafts", *ARMS, "by the first"):
        table.add_column(column, justify="right")
    for (num_rows, num_drafts), by_arm in times.items():
        medians = {name: statistics.median(by_arm[name]) for name in ARMS}
        first = next(iter(medians.values()))
        figures = [f"{medians[name]:.1f} ({min(by_arm[name]):.1f})" for name in ARMS]
        ratios = " ".join(f"{median / first:.2f}" for median in list(medians.values())[1:])
        table.add_row(str(num_rows), str(num_drafts), *figures, ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--rows", default="1,8,32", metavar="N,N,..")
    parser.add_argument("--drafts", default="0,3", metavar="N,N,..")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every arm")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    rows = [int(num) for num in args.rows.split(",")]
    times: Times = defaultdict(lambda: defaultdict(list))
    with Progress(console=Console(stderr=True)) as bar:
        for num_drafts in map(int, args.drafts.split(",")):
            arms = benches(args.path, num_drafts, args.num_threads, max(rows))
            for num_rows in bar.track(rows * args.rounds, description=f"{num_drafts} drafts"):
                for name, bench in arms.items():
                    times[num_rows, num_drafts][name] += turn(bench, num_rows)
    if args.json:
        medians = {
            f"{num_rows} rows, {num_drafts} drafts": {
                name: statistics.median(one) for name, one in by_arm.items()
            }
            for (num_rows, num_drafts), by_arm in times.items()
        }
        print(json.dumps(medians))
    else:
        Console().print(show(times))


if __name__ == "__main__":
    main()
