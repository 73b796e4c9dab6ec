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
        label = "server default" if arm.max_drafts is None else f"{arm.max_drafts} drafts"
        good = [record for record in arm.records if record.error is None]
        _plot_cdf(
            axes=first,
            values=[x for x in map(ttft_ms, good) if x is not None],
            label=label,
            color=color,
        )
        _plot_cdf(
            axes=per_token,
            values=[x for x in map(tpot_ms, good) if x is not None],
            label=label,
            color=color,
        )
        _tokens_over_time(axes=tokens, arm=arm, label=label, color=color)
        shares = arm.acceptance.per_position
        if shares:
            drafts.plot(range(1, len(shares) + 1), shares, marker="o", label=label, color=color)
    _label_axes(axes=first, title="time to first token", x="ms", y="share of answers")
    _label_axes(axes=per_token, title="time per output token", x="ms", y="share of answers")
    _label_axes(axes=tokens, title="output tokens received", x="s", y="tokens")
    _label_axes(axes=drafts, title="drafts accepted", x="position", y="share of drafts")
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
