"""What a process that keeps a core busy costs a decode step beside it.

    python -m benchmarks.neighbour [--rows 1,8] [--drafts 0,3] [--rounds 8] [--num-busy 1]
        [--num-threads 2] [--json]

Turns alone and turns beside ``--num-busy`` processes that do nothing but compute follow each other;
a figure is all time of a turn's steps by their number, the median of turns.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.busy import busy
from benchmarks.decode_step import Case, benches, turn
from tandem.core.config import TINY_MODEL

ARM = "recorded bf16"
NUM_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY_MODEL, help="checkpoint folder")
    parser.add_argument("--rows", default="1,8", metavar="N,N,..")
    parser.add_argument("--drafts", default="0,3", metavar="N,N,..")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each")
    parser.add_argument("--num-busy", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    rows, drafts = ([int(num) for num in text.split(",")] for text in (args.rows, args.drafts))
    found = []
    with Progress(console=Console(stderr=True)) as bar:
        for num_drafts in drafts:
            [bench] = benches(args.path, [ARM], num_drafts, args.num_threads, max(rows)).values()
            for num in rows:
                case, ms = Case(num, num_drafts, "greedy"), defaultdict(list)
                for i in bar.track(range(2 * args.rounds), description=f"{num} rows"):
                    num_busy = args.num_busy if i % 4 in (1, 2) else 0
                    with busy(num_busy):
                        walls = [step.wall for step in turn(bench, case, NUM_STEPS)]
                    ms["alone" if num_busy == 0 else "beside"].append(statistics.fmean(walls))
                medians = {name: statistics.median(turns) for name, turns in ms.items()}
                worst = max(ms["beside"]) / medians["alone"]
                found.append({"rows": num, "drafts": num_drafts, "worst": worst} | medians)
    print(json.dumps(found)) if args.json else Console().print(table(found, args.num_busy))


def table(found: list[dict[str, float]], num_busy: int) -> Table:
    shown = Table(title=f"ms a step, alone and beside {num_busy} busy")
    for column in ("rows", "drafts", "alone", "beside", "by alone", "the worst turn"):
        shown.add_column(column, justify="right")
    for one in found:
        ratio = one["beside"] / one["alone"]
        counts = f"{one['rows']:.0f}", f"{one['drafts']:.0f}"
        figures = one["alone"], one["beside"], ratio, one["worst"]
        shown.add_row(*counts, *(f"{figure:.2f}" for figure in figures))
    return shown


if __name__ == "__main__":
    main()
