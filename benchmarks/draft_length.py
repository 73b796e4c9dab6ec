"""Tokens per second by number of rows with drafts held at each level, and with as many as pay.

    python -m benchmarks.draft_length [--batch-sizes 1,8,32] [--wrong] [--plot FILE.png] [--json]
        [--set speculation.drafter=ngram ..]
    python -m benchmarks.draft_length --change [--batch-sizes 1,8,32]

All arms answer the same held-out prompts, as many at any time as there are rows, and the one that
has the fewest tokens does the next step, so that the machine's other work hits them alike (whole
turns of one arm differ by 10 to 25 %). After each round engines are dealt anew, or the one whose
memory lies best would win where levels are alike (by 2 to 5 %); to hand them on in turn is not
enough, for who follows a level that drafts finds other contexts than who does not (1.5 to 4 %).
"none" is an engine without any draft layer, for comparison.
What "by_load" spends on looking at other lengths while it serves is in its figure; what it measures
while idle before is not, nor are every arm's first rounds, in which programs are met for the first
time. Prefill does not count. With --change all drafts are wrong at first and right later, and the
steps are counted until the length is what it is where they were right all the time.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from operator import attrgetter, truediv
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.accepted_length import TINY, requests
from benchmarks.driven.engines import Bench, Held, load
from core.config import load as load_config
from core.levels import Level, Levels
from core.request import Request
from decode_node.planning.lengths import Costs, DraftLength, by_load
from decode_node.planning.step_plan import Proposal, StepPlan
from decode_node.planning.step_planner import StepPlanner
from model.drafters.base import Drafter, Drafts, Own, View
from model.drafters.none import NoDrafter
from model.loaded import LoadedModel
from model.network.cache import Caches
from runtime.lockstep import LocalPlanner

NUM_PROMPTS, MAX_DEPTH = 100, 3
"""The depth unless speculation.num_tokens is set."""
ROUND_TOKENS = 50
"""Of a round, a row."""
PAGE_SIZE = 64
BY_LOAD, NONE = "by_load", "none"


class Wrong:
    """The checkpoint's drafter, but every draft is another token as long as ``shift_1`` is not 0; a
    tensor, for it counts in programs that are recorded."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self.shift_1 = torch.ones(1, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draft(self, own: Own, view: View, level: Level, amount: int, caches: Caches) -> Drafts:
        drafts = self._inner.draft(own, view, level, amount, caches)
        return drafts._replace(tokens_BN=(drafts.tokens_BN + self.shift_1) % self._vocab_size)


class Engine:
    """Serves requests without end."""

    def __init__(
        self, loaded: LoadedModel, num_drafts: int, asked: list[Request], num_rows: int
    ) -> None:
        self._asked, self._num_rows = cycled(asked, num_rows), num_rows
        # A prompt's pages are held twice while it is handed over.
        most = 2 * max(len(one.prompt_ids) for one in asked) + asked[0].sampling.max_tokens
        self.bench = Bench(
            loaded,
            num_drafts=num_drafts,
            draft_length=BY_LOAD,
            max_rows=num_rows,
            num_pages=1 + num_rows * (-(-most // PAGE_SIZE) + 3),
            page_size=PAGE_SIZE,
            measures=True,
        )
        for cache in self.bench.all_caches():  # trials read it: of NaN, their rows are all alike
            cache[0].zero_()
        planner = self.bench.decode._planner
        assert isinstance(planner, LocalPlanner) and isinstance(planner._decide, StepPlanner)
        self.decide, self._is_new = planner._decide, False
        planner._decide = self._plan

    def choose(self, length: DraftLength, costs: Costs) -> None:
        """That way from now on. The table of programs remains the engine's."""
        self.decide._length, self.decide._costs, self._is_new = length, costs, True

    def _plan(self, proposals: Sequence[Proposal]) -> StepPlan | None:
        """What is reported first of a new way is of a step of another's."""
        if self._is_new:
            proposals = [replace(one, report=None) for one in proposals]
        self._is_new = False
        return self.decide(proposals)

    def step(self) -> tuple[int, float]:
        """With requests in all rows. Its tokens and seconds."""
        while len(self.bench.decode.scheduler.sequences) < self._num_rows:
            self.bench.start(next(self._asked))
        self.bench.frames.clear()
        began_at = time.perf_counter()
        self.bench.decode.step()
        spent_s = time.perf_counter() - began_at
        return sum(len(update.token_ids) for update in self.bench.updates()), spent_s

    @property
    def num_context(self) -> int:
        """Tokens that are known of a row on average."""
        held = self.bench.decode.scheduler.running
        return sum(one.num_known for one in held) // max(1, len(held))

    def end(self) -> None:
        for identity in [*self.bench.decode.scheduler.sequences]:
            self.bench.decode.drop(identity)
        self.bench.check_empty()


class Arm:
    """One way to choose the length, in one engine after the other; what it has learned lasts."""

    def __init__(self, length: DraftLength, engine: Engine) -> None:
        self._length, self.costs = length, engine.decide._costs
        self.rates: list[float] = []
        self.num_tokens, self.spent_s = 0, 0.0
        self.sit(engine)

    def sit(self, engine: Engine) -> None:
        self.engine = engine
        engine.choose(self._length, self.costs)

    def step(self) -> None:
        num, spent_s = self.engine.step()
        self.num_tokens, self.spent_s = self.num_tokens + num, self.spent_s + spent_s


def by_load_arm(loaded: LoadedModel, depth: int, asked: list[Request], num_rows: int) -> Arm:
    """With what it measures while idle."""
    engine = Engine(loaded, depth, asked, num_rows)
    while engine.bench.decode.has_work():
        engine.bench.decode.step()
    return Arm(by_load, engine)


def measure(
    loaded: LoadedModel,
    depth: int,
    asked: list[Request],
    num_rows: int,
    num_warm: int,
    num_rounds: int,
    bar: Progress | None = None,
) -> dict[str, list[float]]:
    """Tokens per second of each arm in each round."""
    arms = {
        str(n): Arm(Held(n), Engine(loaded, depth, asked, num_rows))
        for n in range(len(loaded.drafter.levels(depth)))
    }
    arms[BY_LOAD] = by_load_arm(loaded, depth, asked, num_rows)
    moving = [*arms.values()]
    arms[NONE] = by_load_arm(replace(loaded, drafter=NoDrafter()), 0, asked, num_rows)
    rounds = range(num_warm + num_rounds)
    for i in bar.track(rounds, description=f"{num_rows} rows") if bar else rounds:
        together([*arms.values()], (i + 1) * num_rows * ROUND_TOKENS, counts=i >= num_warm)
        engines = random.Random(i).sample([arm.engine for arm in moving], len(moving))
        for arm, engine in zip(moving, engines, strict=True):
            arm.sit(engine)
    for arm in arms.values():
        arm.engine.end()
    return {name: arm.rates for name, arm in arms.items()}


def together(arms: Sequence[Arm], num_tokens: int, counts: bool) -> None:
    """Until each of them has so many. In another order each time: a step right behind one that is
    large finds the caches cold, and takes up to 15 % longer."""
    arms = random.Random(num_tokens).sample(arms, len(arms))
    before = [(arm.num_tokens, arm.spent_s) for arm in arms]
    while (arm := min(arms, key=attrgetter("num_tokens"))).num_tokens < num_tokens:
        arm.step()
    for arm, (num, spent_s) in zip(arms, before, strict=True):
        if counts:
            arm.rates.append((arm.num_tokens - num) / (arm.spent_s - spent_s))


def cycled(asked: list[Request], num_rows: int) -> Iterator[Request]:
    """Again and again. The first ones end one after the other, or all rows would be at the same
    place of their texts for ever."""
    for i, one in enumerate(cycle(asked)):
        num = one.sampling.max_tokens
        if i < num_rows:
            num = -(-num * (i + 1) // num_rows)
        yield replace(one, request_id=f"r{i}", sampling=replace(one.sampling, max_tokens=num))


def of_best(rates: dict[str, list[float]]) -> float:
    """by_load over the best held level, round by round, in which both met the same prompts."""
    held = filter(str.isdecimal, rates)
    best = rates[max(held, key=lambda name: statistics.median(rates[name]))]
    return statistics.median(map(truediv, rates[BY_LOAD], best))


NUM_BEFORE, NUM_AFTER = 400, 800
"""Steps with wrong drafts, and with right ones."""
ALIKE = 0.97


def changed(
    loaded: LoadedModel, depth: int, wrong: Wrong, asked: list[Request], num_rows: int
) -> tuple[int, int, int]:
    """The levels in use before and long after drafts have become right, and the steps until one
    is in use that is worth as much by what is known at the end, but for ALIKE."""
    arm = by_load_arm(loaded, depth, asked, num_rows)
    wrong.shift_1.fill_(1)
    lengths = []
    for step in range(NUM_BEFORE + NUM_AFTER):
        if step == NUM_BEFORE:
            wrong.shift_1.fill_(0)
        arm.step()
        size = arm.costs.of_size(num_rows, arm.engine.num_context)
        lengths.append(size.current)
    after = statistics.mode(lengths[-200:])
    times = zip(arm.costs.expected_tokens(), size.step_s, strict=True)
    worth = [by_depth[-1] / step_s for by_depth, step_s in times]
    good = [n >= ALIKE * max(worth) for n in worth]
    found = (step for step, n in enumerate(lengths[NUM_BEFORE:]) if good[n])
    return lengths[NUM_BEFORE - 1], after, next(found, NUM_AFTER)


def label_of(name: str, levels: Levels) -> str:
    if not name.isdecimal():
        return name
    level = levels[int(name)]
    return f"n = {name}" if level.is_chain else f"{level.num_nodes} nodes"


def show(results: dict[int, dict[str, list[float]]], levels: Levels, title: str) -> Table:
    table = Table(title=f"{title}: tokens per second, all rows together, medians")
    table.add_column("rows")
    for name in next(iter(results.values())):
        table.add_column(label_of(name, levels), justify="right")
    table.add_column("by_load / best", justify="right")
    table.add_column("per token, by_load / none", justify="right")
    for size, rates in results.items():
        cells = [f"{statistics.median(rates[name]):.0f}" for name in rates]
        gain = statistics.median(map(truediv, rates[NONE], rates[BY_LOAD]))
        table.add_row(str(size), *cells, f"{of_best(rates):.3f}", f"{gain:.2f}")
    return table


def save_plot(path: Path, results: dict[int, dict[str, list[float]]], levels: Levels) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in [one for one in next(iter(results.values())) if one != NONE]:
        rates = [statistics.median(rates[name]) for rates in results.values()]
        style = {"linewidth": 3, "color": "black"} if name == BY_LOAD else {"linestyle": "--"}
        label = "as many as pay" if name == BY_LOAD else label_of(name, levels)
        axes.plot(list(results), rates, marker="o", label=label, **style)
    axes.set(xlabel="rows", ylabel="tokens per second", xscale="log", ylim=(0, None))
    axes.set_xticks(list(results), [str(size) for size in results])
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--batch-sizes", default="1,4,8,16,32", metavar="N,N,..", help="rows")
    parser.add_argument("--rounds", type=int, default=20, help="that count [20]")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds before these [20]")
    parser.add_argument("--max-tokens", type=int, default=300, help="of an answer [300]")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="every draft is another token")
    parser.add_argument("--change", action="store_true", help="wrong at first, right later")
    parser.add_argument("--dtype", default="bfloat16", help="[bfloat16]")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    threads, dtype = f"decode.num_threads={args.num_threads}", f"model.dtype={args.dtype}"
    sets = [f"speculation.num_tokens={MAX_DEPTH}", *args.sets]
    depth = load_config(None, sets).speculation.num_tokens
    loaded = load(args.path, threads, dtype, *sets)
    levels = loaded.drafter.levels(depth)
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
