"""When drafts pay, by rows and context: MagicDec's regime model (arXiv 2408.11049) and
measurements.

    python -m benchmarks.regimes [--json FILE.json] [--plot FILE.png]

T_T is the time of a plain step, T_V of verifying n drafts, and T_D of making one draft. They are
fitted to whole steps at FIT. N-grams, which cost almost nothing to draft, give T_V. At TRIED, which
the fit has not seen, steps of each drafter are timed the same way.

A step of n drafts gives Omega(n, a) = 1 + a + .. + a^n tokens, where a is the measured acceptance.
A token takes (n T_D + T_V(n)) / (Omega T_T) of the time without drafts. Takes about 20 minutes on
two cores.
"""

import argparse
import json
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks.regimes.fit import NONE, Cell, Model, Times, fitted
from benchmarks.regimes.show import save_plot, show
from benchmarks.regimes.steps import FREE, ArmName, Taken, alpha_of, read_by, taken

FIT = tuple(product((256, 1024, 3072, 7424), (4, 8, 16)))
TRIED = tuple((context, 8) for context in (512, 2048, 7168))
ROUNDS, TRIED_ROUNDS = 10, 18


def times_of(found: dict[ArmName, Taken], num_rows: int) -> list[Times]:
    context = found[NONE, 0].context
    return [
        Times(name, num_rows, context, read_by(name, context), n, one.step_s)
        for (name, n), one in found.items()
    ]


def cells_of(model: Model, context: int, num_rows: int, found: dict[ArmName, Taken]) -> list[Cell]:
    plain, cells = found[NONE, 0], []
    for (name, n), one in found.items():
        if name == NONE:
            continue
        alpha, read = alpha_of(found, name, num_rows), read_by(name, plain.context)
        predicted = model.ratio(name, num_rows, plain.context, read, n, alpha)
        measured = one.step_s / one.tokens_of_a_step(num_rows) / plain.step_s
        cells.append(Cell(context, name, n, alpha, predicted, measured))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    times: list[Times] = []
    for context, num_rows in FIT:
        times += times_of(taken(num_rows, context, ROUNDS, args.num_threads), num_rows)
    model = fitted(FREE, times)
    cells: list[Cell] = []
    for context, num_rows in TRIED:
        found = taken(num_rows, context, TRIED_ROUNDS, args.num_threads)
        cells += cells_of(model, context, num_rows, found)
    if args.json is not None:
        told = {"model": model, "times": times, "cells": cells}
        text = json.dumps(told, default=asdict, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        save_plot(args.plot, cells)
    show(model, cells)


if __name__ == "__main__":
    main()
