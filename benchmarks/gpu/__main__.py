"""Check and measure Tandem on one GPU, and compare each part with its minimum time.

    python -m benchmarks.gpu                          # every section that has no results yet
    python -m benchmarks.gpu --sections kernels,steps --again

    python -m benchmarks.gpu --rehearse --out /tmp/x  # test it on a CPU, small
    python -m benchmarks.gpu --table --plot x.png     # show earlier results

Sections run one after another, each in a separate process with a time limit. If a section is ended,
its results so far are kept. Lines go to OUT/results.jsonl. Weights are random and made on the
device, except those of the shipped checkpoint. Nothing is tuned during a run.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.device import Device
from benchmarks.gpu.plot import save_plot
from benchmarks.gpu.say import OUT, Say, lines, results_file

SECTIONS = {
    "ceilings": 30,
    "exact": 150,
    "drafters": 150,
    "kernels": 120,
    "steps": 200,
    "costs": 60,
    "libraries": 45,
    "prefill": 60,
    "handover": 30,
    "wire": 60,
    "gang": 60,
    "answers": 60,
}
"""Time limit of each section in seconds."""


def main() -> None:
    args = _arguments()
    if args.out:
        os.environ[OUT] = str(args.out)
    results_file().parent.mkdir(parents=True, exist_ok=True)
    if args.section:
        say = Say(args.section)
        import_module(f"benchmarks.gpu.{args.section}").run(Device(args.rehearse), say)
        if say.wrong:
            raise SystemExit(f"{args.section}: wrong: {'; '.join(say.wrong)}")
        return
    failed = [] if args.table else _run_all(args)
    Console(width=150).print(_table())
    if args.plot:
        save_plot(args.plot)
        print(f"plotted to {args.plot}")
    if failed:
        raise SystemExit(f"not whole: {', '.join(failed)}")


def _run_all(args: argparse.Namespace) -> list[str]:
    """Return the names of sections that failed or timed out."""
    done, failed = {line["section"] for line in lines() if line["what"] == "took"}, []
    ends_at = time.monotonic() + args.minutes * 60
    for name in args.sections.split(","):
        if name not in SECTIONS:
            raise SystemExit(f"--sections {name}: known are {', '.join(SECTIONS)}")
        if name in done and not args.again:
            continue
        left = min(SECTIONS[name], ends_at - time.monotonic())
        if not _run_one(name, left, args.rehearse):
            failed.append(name)
    return failed


def _run_one(name: str, limit_s: float, is_rehearsal: bool) -> bool:
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name]
    began_at = time.monotonic()
    try:
        subprocess.run(command + ["--rehearse"] * is_rehearsal, check=True, timeout=limit_s)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: {error}", flush=True)
        return False
    Say(name)("took", s=time.monotonic() - began_at)
    return True


def _table() -> Table:
    """Return the latest result of each name."""
    table = Table(title=str(results_file()))
    for column in ("section", "what", "figures"):
        table.add_column(column)
    for (section, what), line in {(one["section"], one["what"]): one for one in lines()}.items():
        figures = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items())
        told = [one for one in figures if not one.startswith(("section ", "what "))]
        table.add_row(section, what, ", ".join(told))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), metavar="NAME,..", help="[all]")
    parser.add_argument("--again", action="store_true", help="also sections that have results")
    parser.add_argument(
        "--minutes", type=float, default=8, help="limit of all sections together [8]"
    )
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU with small sizes")
    parser.add_argument("--table", action="store_true", help="only show earlier results")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot of the shares of floors"
    )
    parser.add_argument("--out", type=Path, help="folder [build/gpu]")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
