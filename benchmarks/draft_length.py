"""Tokens per second by number of rows, with fixed draft shapes and with adaptive length.

    python -m benchmarks.draft_length [--batch-sizes 1,8,32] [--wrong] [--plot FILE.png] [--json]
        [--set speculation.drafter=ngram ..]

    python -m benchmarks.draft_length --change [--batch-sizes 1,8,32]

All arms answer the same held-out prompts and keep all rows busy. The arm with the fewest tokens
always runs the next step, so that other work of the machine affects all arms equally. Whole turns
of one arm differ by 10 to 25 %.

After each round the engines are dealt to the arms at random. Otherwise the engine with the best
memory layout would win between equally fast shapes, by 2 to 5 %. Passing engines on in a fixed
order is not enough. An engine that follows an arm with many accepted drafts meets other contexts,
which changes results by 1.5 to 4 %.

The arm "none" is an engine without any draft layer, for comparison. The figure of "adaptive"
includes the cost of exploring other lengths while serving. It excludes measurements while idle
before that. The first rounds of all arms do not count, because programs run for the first time in
them. Prefill does not count.

With --change all drafts are wrong at first and right later. The command counts the steps until the
length is the one for drafts that were right all the time.
"""

import argparse
import json
import random
import statistics
from dataclasses import replace
from operator import truediv
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.accepted_length import TINY, requests
from benchmarks.harness.engines import Held, load
from benchmarks.harness.turns import ADAPTIVE, Arm, Engine, adaptive_arm, together
from benchmarks.harness.wrong import Wrong, changed
from tandem.core.config import load as load_config
from tandem.core.draft_shapes import DraftShapes
from tandem.core.request import Request
from tandem.model.drafters.none import NoDrafter
from tandem.model.loaded import LoadedModel

NUM_PROMPTS, MAX_DEPTH = 100, 3
"""Maximum depth of drafts, unless speculation.max_depth is set."""
ROUND_TOKENS = 50
"""Tokens of a round, per row."""
NONE = "none"


def measure(
    loaded: LoadedModel,
    depth: int,
    asked: list[Request],
    num_rows: int,
    num_warm: int,
    num_rounds: int,
    bar: Progress | None = None,
) -> dict[str, list[float]]:
    """Return the tokens per second of each arm in each round."""
    arms = {
        str(n): Arm(Held(n), Engine(loaded, depth, asked, num_rows))
        for n in range(len(loaded.drafter.draft_shapes(depth)))
    }
    arms[ADAPTIVE] = adaptive_arm(loaded, depth, asked, num_rows)
    moving = [*arms.values()]
    arms[NONE] = adaptive_arm(replace(loaded, drafter=NoDrafter()), 0, asked, num_rows)
    rounds = range(num_warm + num_rounds)
    for i in bar.track(rounds, description=f"{num_rows} rows") if bar else rounds:
        together([*arms.values()], (i + 1) * num_rows * ROUND_TOKENS, counts=i >= num_warm)
        engines = random.Random(i).sample([arm.engine for arm in moving], len(moving))
        for arm, engine in zip(moving, engines, strict=True):
            arm.sit(engine)
    for arm in arms.values():
        arm.engine.end()
    return {name: arm.rates for name, arm in arms.items()}


def of_best(rates: dict[str, list[float]]) -> float:
    """Return the speed of adaptive relative to the best fixed shape.

    This is the median over rounds; both arms met the same prompts in a round.
    """
    held = filter(str.isdecimal, rates)
    best = rates[max(held, key=lambda name: statistics.median(rates[name]))]
    return statistics.median(map(truediv, rates[ADAPTIVE], best))


def label_of(name: str, levels: DraftShapes) -> str:
    if not name.isdecimal():
        return name
    level = levels[int(name)]
    return f"n = {name}" if level.is_chain else f"{level.num_nodes} nodes"


def show(results: dict[int, dict[str, list[float]]], levels: DraftShapes, title: str) -> Table:
    table = Table(title=f"{title}: tokens per second, all rows together, medians")
    table.add_column("rows")
    for name in next(iter(results.values())):
        table.add_column(label_of(name, levels), justify="right")
    table.add_column("adaptive / best", justify="right")
    table.add_column("per token, adaptive / none", justify="right")
    for size, rates in results.items():
        cells = [f"{statistics.median(rates[name]):.0f}" for name in rates]
        gain = statistics.median(map(truediv, rates[NONE], rates[ADAPTIVE]))
        table.add_row(str(size), *cells, f"{of_best(rates):.3f}", f"{gain:.2f}")
    return table


def save_plot(path: Path, results: dict[int, dict[str, list[float]]], levels: DraftShapes) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in [one for one in next(iter(results.values())) if one != NONE]:
        rates = [statistics.median(rates[name]) for rates in results.values()]
        style = {"linewidth": 3, "color": "black"} if name == ADAPTIVE else {"linestyle": "--"}
        label = "as many as pay" if name == ADAPTIVE else label_of(name, levels)
        axes.plot(list(results), rates, marker="o", label=label, **style)
    axes.set(xlabel="rows", ylabel="tokens per second", xscale="log", ylim=(0, None))
    axes.set_xticks(list(results), [str(size) for size in results])
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--batch-sizes", default="1,4,8,16,32", metavar="N,N,..", help="rows")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds [20]")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds before them [20]")
    parser.add_argument("--max-tokens", type=int, default=300, help="tokens of an answer [300]")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="make every draft wrong")
    parser.add_argument("--change", action="store_true", help="drafts wrong at first, right later")
    parser.add_argument("--dtype", default="bfloat16", help="[bfloat16]")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    threads, dtype = f"decode.num_threads={args.num_threads}", f"model.dtype={args.dtype}"
    sets = [f"speculation.max_depth={MAX_DEPTH}", *args.sets]
    depth = load_config(None, sets).speculation.max_depth
    loaded = load(args.path, threads, dtype, *sets)
    levels = loaded.drafter.draft_shapes(depth)
    if args.wrong or args.change:
        wrong = Wrong(loaded.drafter, loaded.config.vocab_size)
        loaded = replace(loaded, drafter=wrong)
    asked = requests(args.path, NUM_PROMPTS, args.max_tokens)
    if args.change:
        for size in sizes:
            before, after, steps = changed(loaded, depth, wrong, asked, size)
            print(f"{size} rows: level {before}, then {after}; as good a one after {steps} steps")
        return
    with Progress(console=Console(stderr=True)) as bar:
        rounds = args.warm_up, args.rounds
        results = {size: measure(loaded, depth, asked, size, *rounds, bar) for size in sizes}
    if args.plot is not None:
        save_plot(args.plot, results, levels)
    if args.json:
        print(json.dumps(results))
    else:
        Console().print(show(results, levels, loaded.drafter.name))


if __name__ == "__main__":
    main()
