"""Simulate a cluster in virtual time: the seed decides the faults, and no request may be lost."""

import argparse
import os
import subprocess
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children
from pathlib import Path

from tqdm import tqdm

from tests.sim.fault import Fault
from tests.sim.mix import RUSHES, faults_of
from tests.sim.once import ONCE, run_once
from tests.sim.run import Result, run_seed, shortest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many [50]")
    parser.add_argument("--first", type=int, default=RUSHES, help=f"of these [{RUSHES}]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes [cores]")
    parser.add_argument("--stop", action="store_true", help="after the first that fails")
    parser.add_argument("--once", action="store_true", help="only what failed before it was mended")
    parser.add_argument(
        "--seed", type=int, nargs="+", help="these alone, with all that can be told of them"
    )
    parser.add_argument("--log", action="store_true", help="of --seed: all that happens")
    parser.add_argument("--shrink", action="store_true", help="of --seed: faults it fails without")
    parser.add_argument(
        "--fault",
        type=Fault.of,
        action="append",
        metavar="AT,KIND,NUMBER,SECONDS",
        help="of --seed: these faults in place of its own",
    )
    args = parser.parse_args()
    if args.once:
        once()
    if args.seed is None:
        many(range(args.first, args.first + args.seeds), args.jobs, args.stop)
    num_bad = sum(one(seed, args) for seed in args.seed)
    os._exit(num_bad > 0)  # skip cleanup: interrupted work would go on and raise errors


def one(seed: int, args: argparse.Namespace) -> bool:
    """Run ``seed`` and print its results; return whether it failed."""
    faults = args.fault or faults_of(seed)
    if args.shrink:
        faults = shortest(seed, faults)
    result = run_seed(seed, faults, keeps_log=args.log)
    tell(result)
    faults_told = (f"--fault '{fault}'" for fault in result.faults)
    print(result.num_updates, *faults_told, sep="\n  ", flush=True)
    return bool(result.failures)


def once() -> None:
    num_bad = 0
    for what in ONCE:
        result = run_once(what)
        num_bad += bool(result.failures)
        tell(result)
        print(f"  {sum(result.num_faults.values())} of {len(result.faults)} faults: {what}")
    raise SystemExit(num_bad > 0)


def many(seeds: range, num_jobs: int, stops: bool) -> None:
    began_at, num_bad = time.perf_counter(), 0
    faults_seen: Counter[str] = Counter()
    longest_s = 0.0
    with ProcessPoolExecutor(num_jobs) as pool:
        for result in tqdm(pool.map(run_seed, seeds), total=len(seeds), unit="seed", disable=None):
            faults_seen.update(result.num_faults)
            longest_s = max(longest_s, result.longest_s)
            if result.failures:
                num_bad += 1
                tell(result)
                if stops:
                    for process in active_children():
                        process.kill()  # their seeds are no longer needed
                    os._exit(1)
    per_s = len(seeds) / (time.perf_counter() - began_at)
    print(f"{len(seeds)} seeds, {num_bad} with failures, {per_s:.2f} a second")
    print(", ".join(f"{num} x {kind}" for kind, num in sorted(faults_seen.items())))
    print(f"{longest_s:.1f} s: the longest that a request waited in a cluster that was well")
    raise SystemExit(num_bad > 0)


def tell(result: Result) -> None:
    """Print the seed's failures and the commit."""
    told = [f"seed {result.seed}, trace {result.trace}"]
    if result.failures:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        told += [
            *result.failures,
            f"at {commit}; python -m tests.sim --seed {result.seed} --shrink",
        ]
    print(*told, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
