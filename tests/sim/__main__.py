"""Run seeds of the simulated cluster; what fails is cut down to the faults that it takes."""

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.sim.run import Result, faults_of, run_seed, shortest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many [50]")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--log", action="store_true", help="all that happens")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--shrink", action="store_true", help="of a --seed that fails")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.seed is not None:
        faults = [] if args.no_faults else faults_of(args.seed)
        if args.shrink:
            faults = shortest(args.seed, faults)
        told(run_seed(args.seed, faults, keeps_log=args.log), is_whole=True)
        return
    began_at = time.perf_counter()
    seeds = range(args.first, args.first + args.seeds)
    faults_seen: Counter[str] = Counter()
    num_bad = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for result in pool.map(run_seed, seeds, chunksize=10):
            faults_seen.update(result.num_faults)
            if result.failures:
                num_bad += 1
                told(result)
    took_s = time.perf_counter() - began_at
    print(f"{len(seeds)} seeds, {num_bad} with failures, {len(seeds) / took_s:.2f} a second")
    print(", ".join(f"{num} x {kind}" for kind, num in sorted(faults_seen.items())))
    raise SystemExit(num_bad > 0)


def told(result: Result, is_whole: bool = False) -> None:
    print(f"seed {result.seed}, trace {result.trace}", *result.failures, sep="\n  ", flush=True)
    if is_whole:
        print(*result.faults, result.num_told, sep="\n  ")


if __name__ == "__main__":
    main()
