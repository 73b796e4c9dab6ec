"""Plot the share of their floors' rate that steps and prompts reach."""

import re
from collections import defaultdict
from pathlib import Path

from benchmarks.gpu.say import lines

STEP = re.compile(r"(?P<shape>.+), (?P<x>\d+) rows of (?P<context>\d+), n = (?P<n>\d+)")
PROMPT = re.compile(r"(?P<shape>.+), (?P<x>\d+) tokens")
GOALS = {"steps": ((1, 0.6), (32, 0.7)), "prefill": ((1024, 0.6), (4096, 0.45), (16384, 0.45))}
"""Rows or tokens, and the share to reach. For prompts of 4k and more, it is a share of the matrix
rate."""
Curves = dict[str, dict[int, float]]


def save_plot(path: Path) -> None:
    from matplotlib.figure import Figure

    steps, prompts = curves("steps"), curves("prefill")
    panels = [(shape, "rows", "steps", lines) for shape, lines in steps.items()]
    panels.append(("prompts read at once", "tokens", "prefill", prompts.get("", {})))
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    for axes, (title, unit, section, found) in zip(
        figure.subplots(1, len(panels), sharey=True), panels, strict=True
    ):
        for i, (name, line) in enumerate(found.items()):
            style = {"ls": "--" if name.endswith("n = 3") else "-"}
            if section == "steps":
                style["color"] = f"C{i // 2}"
            axes.plot(
                sorted(line), [line[x] for x in sorted(line)], marker="o", label=name, **style
            )
        axes.plot(*zip(*GOALS[section], strict=True), "k_", markersize=18, label="goal")
        axes.set(title=title, xlabel=unit, xscale="log", ylim=(0, 1))
        ticks = sorted({x for line in found.values() for x in line})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.legend(fontsize="small", loc="lower left")
    figure.axes[0].set_ylabel("floor / measured time")
    figure.savefig(path, dpi=120)


def curves(section: str) -> dict[str, Curves]:
    """Return the share of the floor's rate by rows or tokens.

    Steps are grouped by shape, then by context and number of drafts; prompts by shape.
    """
    found: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    pattern = {"steps": STEP, "prefill": PROMPT}[section]
    for line in lines():
        told = pattern.fullmatch(line["what"]) if line["section"] == section else None
        if told is None:
            continue
        is_long = section == "prefill" and int(told["x"]) >= 4096
        shape, name = "", told["shape"]
        if section == "steps":
            shape, name = name, f"{told['context']}, n = {told['n']}"
        found[shape][name][int(told["x"])] = line["of_matrix_rate" if is_long else "of_floor"]
    return found
