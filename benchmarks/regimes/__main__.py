"""When drafts pay, by rows and context: the regime model of MagicDec (arXiv 2408.11049, seeds 003)
beside what was measured.

    python -m benchmarks.regimes [--json docs/regimes.json]

T_T, T_V and T_D, the times of a plain step, of verifying n drafts and of making one, are fitted to
parts of steps at FIT. At TRIED, which the fit has not seen, whole steps of each drafter are timed
in turns. A step of n drafts gives Omega(n, a) = 1 + a + .. + a^n tokens, and a token takes
(n T_D + T_V(n)) / (Omega T_T) of the time of one without drafts; a is what was accepted there.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import truediv
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.draft_length import Arm, Engine, together
from benchmarks.driven.engines import Held, load
from benchmarks.driven.held_out import held_out
from benchmarks.regimes.fit import Model, Times, fitted
from benchmarks.regimes.parts import times_of
from cluster.bench.speculation import fitted_acceptance
from core.config import TINY_MODEL
from core.request import Request, SamplingParams
from model.loaded import LoadedModel

FIT = tuple(product((4, 8, 16), (256, 1024, 3072, 7936)))
TRIED = tuple((8, context) for context in (512, 2048, 7168))
BUDGETS = 4, 16
DEPTHS = 1, 2, 3
NONE, MTP = "none", "mtp"
NUM_WARM, ROUNDS, ROUND_TOKENS, MAX_TOKENS = 2, 9, 16, 1000
FAR = 1 << 20


@dataclass(frozen=True)
class Cell:
    """Of one drafter, n and context: time of a token by that without drafts, as the model has it
    and as it was; ``alpha`` is the share of drafts that was accepted behind accepted ones."""

    context: int
    drafter: str
    num_drafts: int
    alpha: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Tried:
    """Time of a token by that without drafts, and tokens of a row's step."""

    of_none: float
    num_tokens: float


def self_of(budget: int) -> str:
    return f"self {budget}"


def loaded_of(drafter: str, num_threads: int) -> LoadedModel:
    name, _, budget = drafter.partition(" ")
    sets = ["model.kernels=native", f"decode.num_threads={num_threads}", "model.dtype=bfloat16"]
    sets += [f"speculation.drafter={name}", f"speculation.num_tokens={max(DEPTHS)}"]
    return load(TINY_MODEL, *sets, *([f"speculation.budget={budget}"] if budget else []))


def asked_of(num_rows: int, context: int) -> list[Request]:
    """Prompts of slices of held-out files, as no file is so long."""
    texts = iter(held_out(num_rows * (1 + context // 256), 257, 257, seed=5))
    sampling = SamplingParams(seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = []
    for _ in range(num_rows):
        ids: list[int] = []
        while len(ids) < context:
            ids += next(texts)[bool(ids) :]
        prompts.append(ids[:context])
    return [Request(f"r{i}", (*ids,), sampling=sampling) for i, ids in enumerate(prompts)]


def engine_of(drafter: str, num_rows: int, context: int, num_threads: int) -> Engine:
    loaded = loaded_of(drafter, num_threads)
    depth = 0 if drafter == NONE else max(DEPTHS)
    return Engine(loaded, depth, asked_of(num_rows, context), num_rows)


def tried(context: int, num_rows: int, num_threads: int) -> dict[tuple[str, int], Tried]:
    """By drafter and n. All have as many tokens at any time, and so the same contexts."""
    drafters = [(NONE, 0), *product((MTP, *map(self_of, BUDGETS)), DEPTHS)]
    arms = {
        (drafter, n): Arm(Held(n), engine_of(drafter, num_rows, context, num_threads))
        for drafter, n in drafters
    }
    title = f"{num_rows} rows of {context}"
    for i in track(range(NUM_WARM + ROUNDS), title, console=Console(stderr=True)):
        together([*arms.values()], (i + 1) * num_rows * ROUND_TOKENS, counts=i >= NUM_WARM)
    told = {}
    for name, arm in arms.items():
        num_tokens = arm.num_tokens / num_rows / arm.engine.bench.decode.num_steps
        of_none = statistics.median(map(truediv, arms[NONE, 0].rates, arm.rates))
        told[name] = Tried(of_none, num_tokens)
        arm.engine.end()
    return told


def cells(model: Model, num_threads: int) -> list[Cell]:
    found = []
    for num_rows, context in TRIED:
        told = tried(context, num_rows, num_threads)
        mean_context = context + (NUM_WARM + ROUNDS) * ROUND_TOKENS // 2
        for (drafter, n), one in told.items():
            if n == 0:
                continue
            alpha = fitted_acceptance(told[drafter, max(DEPTHS)].num_tokens, max(DEPTHS)) or 0.0
            predicted = model.ratio(drafter, num_rows, mean_context, n, alpha)
            found.append(Cell(context, drafter, n, alpha, predicted, one.of_none))
    return found


def inflection(model: Model, alpha: float, num_rows: int) -> int | None:
    """S_inflection: the least context, up to FAR, from which on some budget and n of self-drafting
    take less time than none; None if there is no such."""
    contexts = [1 << i for i in range(7, FAR.bit_length())]
    pays = [
        min(
            model.ratio(self_of(budget), num_rows, context, n, alpha)
            for budget in BUDGETS
            for n in DEPTHS
        )
        < 1
        for context in contexts
    ]
    return next((one for i, one in enumerate(contexts) if all(pays[i:])), None)


def show(model: Model, found: Sequence[Cell]) -> None:
    console = Console()
    table = Table(title="time of a token by that without drafts, 8 rows")
    for title in ("context", "drafter", "n", "alpha", "model", "measured", "model / measured"):
        table.add_column(title, justify="right")
    for one in found:
        by = one.predicted / one.measured
        figures = one.alpha, one.predicted, one.measured, by
        texts = (f"{figure:.2f}" for figure in figures)
        table.add_row(str(one.context), one.drafter, str(one.num_drafts), *texts)
    console.print(table)
    for context in dict.fromkeys(one.context for one in found):
        mine = [one for one in found if one.context == context]
        none = Cell(context, NONE, 0, 0.0, 1.0, 1.0)
        chosen = min([none, *mine], key=lambda one: one.predicted)
        best = min([none, *mine], key=lambda one: one.measured)
        console.print(
            f"{context}: the model chooses {chosen.drafter} n={chosen.num_drafts} "
            f"({chosen.measured:.2f}), best was {best.drafter} n={best.num_drafts} "
            f"({best.measured:.2f}): {chosen.measured / best.measured - 1:.1%} above it"
        )
        alphas = [one.alpha for one in mine if one.drafter.startswith("self")]
        for num_rows in (1, 8, 32):
            told = [inflection(model, alpha, num_rows) for alpha in (min(alphas), max(alphas), 1.0)]
            console.print(
                f"  S_inflection of {num_rows} rows at alpha {min(alphas):.2f}, {max(alphas):.2f}, "
                f"1: {', '.join('none' if one is None else str(one) for one in told)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also to this file")
    args = parser.parse_args()
    times: list[Times] = []
    for num_rows, context in track(FIT, "parts", console=Console(stderr=True)):
        engine = engine_of(MTP, num_rows, context, args.num_threads)
        times += times_of(engine, num_rows, context, DEPTHS, BUDGETS)
        engine.end()
    model = fitted(times)
    found = cells(model, args.num_threads)
    if args.json is not None:
        told = {"model": asdict(model), "cells": [asdict(one) for one in found]}
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    show(model, found)


if __name__ == "__main__":
    main()
