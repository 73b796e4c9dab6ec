"""Compare all drafters; write tables and plots of benchmarks/results/drafters.md.

    python -m benchmarks.drafters [--only NAME ..] [--redo CELL ..] [--medusa2 DIR]

Results are kept in benchmarks/results/drafters.json, cell by cell. An interrupted run therefore
continues. --redo measures some cells again: lengths, bytes, parts, speeds, beside, lossy or
repeated; "speeds 8" is that number of rows alone. Make MEDUSA-2's checkpoint first, with
``python -m training.medusa2 --out DIR``. The whole takes hours on two cores.
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.drafters import costs, quality
from benchmarks.drafters.arms import MTP, Arm, arms, is_there
from benchmarks.drafters.page import KEPT, ROWS, write

LOSSY = "MTP", "EAGLE-3", "Medusa tree"


def cells(arm: Arm, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    num, num_threads = (args.num_prompts, args.max_tokens), args.num_threads
    mtp = next(one for one in arms() if one.name == MTP)
    made: dict[str, Callable[[], Any]] = {
        "bytes": lambda: costs.bytes_of(arm.loaded()),
        "lengths": partial(quality.lengths, arm, *num),
    }
    for rows in ROWS:
        made[f"parts {rows}"] = partial(costs.parts, arm, rows, num_threads)
        made[f"speeds {rows}"] = partial(costs.speeds, arm, rows, num_threads)
        if arm.is_chain and arm.name != MTP:
            made[f"beside {rows}"] = partial(costs.beside, arm, mtp, rows, num_threads)
    if arm.name in LOSSY:
        made["lossy"] = partial(quality.lossy, arm, *num)
    return made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="measure only these drafters")
    add("--redo", nargs="+", default=[], metavar="CELL", help="measure these cells again")
    add("--skip", nargs="+", default=[], metavar="CELL", help="skip these cells")
    add("--medusa2", type=Path, metavar="DIR", help="checkpoint of training.medusa2")
    add("--num-prompts", type=int, default=100)
    add("--max-tokens", type=int, default=128)
    add("--num-threads", type=int, default=2)
    add("--kept", type=Path, default=KEPT, help="file of results")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    kept: dict[str, Any] = {"arms": {}}
    if args.kept.is_file():
        kept = json.loads(args.kept.read_text(encoding="utf-8"))

    def keep() -> None:
        kept["date"] = date.today().isoformat()
        args.kept.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    if "repeated" not in kept or "repeated" in args.redo:
        kept["repeated"] = quality.repeated(args.num_prompts, args.max_tokens)
        keep()
    wanted = [arm for arm in arms(args.medusa2) if not args.only or arm.name in args.only]
    chosen = [arm for arm in wanted if is_there(arm)]
    for arm in wanted:
        if arm not in chosen:
            Console(stderr=True).print(f"{arm.name}: left out, training/{arm.made_in} is not there")
    with Progress(console=Console(stderr=True)) as bar:
        for arm in bar.track(chosen, description="drafters"):
            told = kept["arms"].setdefault(arm.name, {})
            told["minutes"] = arm.minutes
            for name, made in cells(arm, args).items():
                called = {name, name.split()[0]}
                if called & {*args.skip} or (name in told and not called & {*args.redo}):
                    continue
                bar.console.print(f"{arm.name}: {name}")
                told[name] = made()
                keep()
    command = "`python -m benchmarks.drafters`"
    write(
        kept, f"By {command}, {kept['date']}, {args.num_threads} cores, bf16, shipped checkpoint."
    )


if __name__ == "__main__":
    main()
