"""Plots of results. The only module that needs matplotlib."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tandem.cluster.bench.experiment import Arm
from tandem.cluster.bench.stats import tpot_ms, ttft_ms


def save_plot(path: Path, title: str, arms: Sequence[Arm]) -> None:
    """Save a PNG of four panels: TTFT, TPOT, tokens over time, acceptance by position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    first, per_token, tokens, drafts = figure.subplots(2, 2).flat
    for i, arm in enumerate(arms):
        color = f"C{i}"
        label = "as served" if arm.max_drafts is None else f"{arm.max_drafts} drafts"
        good = [record for record in arm.records if record.error is None]
        _plot_cdf(first, [x for x in map(ttft_ms, good) if x is not None], label, color)
        _plot_cdf(per_token, [x for x in map(tpot_ms, good) if x is not None], label, color)
        _tokens_over_time(tokens, arm, label, color)
        shares = arm.acceptance.per_position
        if shares:
            drafts.plot(range(1, len(shares) + 1), shares, marker="o", label=label, color=color)
    _label_axes(first, "time to first token", "ms", "share of answers")
    _label_axes(per_token, "time per output token", "ms", "share of answers")
    _label_axes(tokens, "output tokens received", "s", "tokens")
    _label_axes(drafts, "drafts accepted", "position", "share of drafts")
    drafts.set_ylim(0, 1)
    drafts.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def _plot_cdf(axes: Any, values: list[float], label: str, color: str) -> None:
    if values:
        axes.ecdf(values, label=label, color=color)


def _tokens_over_time(axes: Any, arm: Arm, label: str, color: str) -> None:
    """Plot received tokens over time. Runs are concatenated without the pauses between them."""
    messages = []
    start_s = 0.0
    for run in arm.runs:
        messages += [(start_s + at, num) for r in run.records for at, num in r.messages]
        start_s += run.duration_s
    messages.sort()
    totals = list(accumulate(num for _, num in messages))
    axes.plot([0.0, *(at for at, _ in messages)], [0, *totals], label=label, color=color)


def _label_axes(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
