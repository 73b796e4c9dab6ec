"""What was measured as a picture: how much of their floors' rate steps and prompts reach."""

import re
from collections import defaultdict
from pathlib import Path

from benchmarks.gpu.say import lines

STEP = re.compile(r"(?P<shape>.+), (?P<x>\d+) rows of (?P<context>\d+), n = (?P<n>\d+)")
PROMPT = re.compile(r"(?P<shape>.+), (?P<x>\d+) tokens")
GOALS = {"steps": ((1, 0.6), (32, 0.7)), "prefill": ((1024, 0.6), (4096, 0.45), (16384, 0.45))}
"""Rows or tokens, and the share asked for: of prompts of 4k and more, that of the matrix rate."""
Curves = dict[str, dict[int, float]]


def save_plot(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = {"steps": ("steps", "rows"), "prefill": ("prompts read at once", "tokens")}
    for axes, (section, (title, unit)) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        found = curves(section)
        for name, line in found.items():
            style = "--" if name.endswith("n = 3") else "-"
            axes.plot(sorted(line), [line[x] for x in sorted(line)], style, marker="o", label=name)
        axes.plot(*zip(*GOALS[section], strict=True), "k_", markersize=18, label="goal")
        axes.set(title=title, xlabel=unit, xscale="log", ylim=(0, 1))
        ticks = sorted({x for line in found.values() for x in line})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.legend(fontsize="small")
    figure.axes[0].set_ylabel("floor / measured time")
    figure.savefig(path, dpi=120)


def curves(section: str) -> Curves:
    """By shape, context and number of drafts: the share of the floor's rate by rows or tokens."""
    found: Curves = defaultdict(dict)
    pattern = {"steps": STEP, "prefill": PROMPT}[section]
    for line in lines():
        told = pattern.fullmatch(line["what"]) if line["section"] == section else None
        if told is None:
            continue
        name = told["shape"]
        if section == "steps":
            name += f", {told['context']}, n = {told['n']}"
        is_long = section == "prefill" and int(told["x"]) >= 4096
        found[name][int(told["x"])] = line["of_matrix_rate" if is_long else "of_floor"]
    return found
