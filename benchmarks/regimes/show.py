"""The model compared with measurements, as a table, as text, and as a plot."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.regimes.fit import NONE, Cell, Model
from benchmarks.regimes.steps import DEPTHS, SELF, read_by

FAR = 1 << 20


def inflection(model: Model, alpha: float, num_rows: int) -> int | None:
    """Return S_inflection: the minimum context from which on self-drafting pays, up to FAR.

    It pays if some budget and n take less time than no drafts. None if there is no such context.
    """
    contexts = [1 << i for i in range(7, FAR.bit_length())]
    pays = [
        min(
            model.ratio(name, num_rows, context, read_by(name, context), n, alpha)
            for name, n in product(SELF, DEPTHS)
        )
        < 1
        for context in contexts
    ]
    return next((one for i, one in enumerate(contexts) if all(pays[i:])), None)


def show(model: Model, cells: Sequence[Cell]) -> None:
    console = Console()
    table = Table(title="time of a token by that without drafts, 8 rows")
    for title in ("context", "drafter", "n", "alpha", "model", "measured", "model / measured"):
        table.add_column(title, justify="right")
    for one in cells:
        by = one.predicted / one.measured
        figures = one.alpha, one.predicted, one.measured, by
        texts = (f"{figure:.2f}" for figure in figures)
        table.add_row(str(one.context), one.drafter, str(one.num_drafts), *texts)
    console.print(table)
    for context in dict.fromkeys(one.context for one in cells):
        mine = [one for one in cells if one.context == context]
        console.print(choice(context, mine))
        alphas = [one.alpha for one in mine if one.drafter in SELF]
        for num_rows in (1, 8, 32):
            told = [inflection(model, alpha, num_rows) for alpha in (min(alphas), max(alphas), 1.0)]
            console.print(
                f"  S_inflection of {num_rows} rows at alpha {min(alphas):.2f}, {max(alphas):.2f}, "
                f"1: {', '.join('none' if one is None else str(one) for one in told)}"
            )


def choice(context: int, cells: Sequence[Cell]) -> str:
    """Return the model's choice at a context, and its cost compared with the best one."""
    everything = [Cell(context, NONE, 0, 0.0, 1.0, 1.0), *cells]
    chosen = min(everything, key=lambda one: one.predicted)
    best = min(everything, key=lambda one: one.measured)
    return (
        f"{context}: the model chooses {chosen.drafter} n={chosen.num_drafts} "
        f"({chosen.measured:.2f}), best was {best.drafter} n={best.num_drafts} "
        f"({best.measured:.2f}): {chosen.measured / best.measured - 1:.1%} above it"
    )


def save_plot(path: Path, cells: Sequence[Cell]) -> None:
    from matplotlib.figure import Figure

    contexts = [*dict.fromkeys(one.context for one in cells)]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    [row] = figure.subplots(1, len(contexts), sharey=True, squeeze=False)
    for axes, context in zip(row, contexts, strict=True):
        for i, name in enumerate(dict.fromkeys(one.drafter for one in cells)):
            mine = [one for one in cells if (one.context, one.drafter) == (context, name)]
            depths = [one.num_drafts for one in mine]
            axes.plot(depths, [one.measured for one in mine], "o-", color=f"C{i}", label=name)
            axes.plot(depths, [one.predicted for one in mine], "x--", color=f"C{i}")
        axes.axhline(1, color="black", linestyle=":")
        axes.set(title=f"context {context}", xlabel="drafts a step", xticks=DEPTHS)
    figure.axes[0].set_ylabel("time of a token by that without drafts")
    told, title = figure.axes[0].get_legend_handles_labels(), "measured; dashed: the model"
    figure.legend(*told, title=title, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
