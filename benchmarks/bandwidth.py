"""What share of the memory's bandwidth a decode step reads with.

    python -m benchmarks.bandwidth [--path DIR] [--rows 1] [--rounds 10] [--num-threads 2] [--json]

Steps, and reading as many bytes as ``benchmarks.cost_growth`` counts of weights and cache, take
turns: so many threads each sum their part of a tensor that no cache holds. The share is reading's
time by a step's, of each turn; bandwidth on a shared machine varies from minute to minute.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.cost_growth import work_of
from benchmarks.decode_step import Case, benches, turn
from benchmarks.versus.cache import default_cache
from benchmarks.versus.checkpoints import RANDOM, find

ARM = "recorded bf16"
CONTEXT = 140
"""Tokens of a row in the middle of a turn."""
NUM_STEPS = 20
NUM_READS = 10


def reading_ms(parts: list[torch.Tensor], pool: ThreadPoolExecutor) -> float:
    times = []
    for _ in range(NUM_READS):
        began_at = time.perf_counter()
        list(pool.map(torch.Tensor.sum, parts))
        times.append(1e3 * (time.perf_counter() - began_at))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, help="[the random checkpoint of 0.5 B of versus]")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    path = args.path or find(RANDOM, default_cache()).path
    [bench] = benches(path, [ARM], 0, args.num_threads, args.rows).values()
    num_bytes = work_of(bench.loaded.config, args.rows, CONTEXT).num_bytes
    parts = list(torch.ones(int(num_bytes) // 4).chunk(args.num_threads))
    steps, reads = [], []
    with (
        ThreadPoolExecutor(args.num_threads) as pool,
        Progress(console=Console(stderr=True)) as bar,
    ):
        for _ in bar.track(range(args.rounds), description="turns"):
            reads.append(reading_ms(parts, pool))
            case = Case(args.rows, 0, "greedy")
            steps.append(statistics.median(step.wall for step in turn(bench, case, NUM_STEPS)))
    shares = [read / step for read, step in zip(reads, steps, strict=True)]
    found = {
        "GB_per_step": num_bytes / 1e9,
        "step_ms": statistics.median(steps),
        "reading_ms": statistics.median(reads),
        "share": statistics.median(shares),
        "least_share": min(shares),
        "most_share": max(shares),
    }
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:12} {value:6.3g}")


if __name__ == "__main__":
    main()
