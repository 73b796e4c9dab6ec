"""Write the measured part of benchmarks/results/drafters.md, and its plots, from drafters.json."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.drafters.arms import CHAIN, MTP

RESULTS = Path(__file__).parents[1] / "results"
PAGE, KEPT = RESULTS / "drafters.md", RESULTS / "drafters.json"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
ROWS = (1, 8, 32)
TEXTS = {"greedy": "(greedy)", "hot": "(T = 0.8)"}
"""Names of the answers in ``repeated``."""
TIMES = """### Time per token

One table per number of concurrent answers. The columns:

| column | meaning |
| --- | --- |
| adaptive / none | time per token with adaptive length, divided by no drafter |
| / MTP, n = 3 | the same, divided by MTP's own ratio with three fixed drafts |
| chain of 3 / MTP's | time per token with three fixed drafts, divided by MTP's, in turns |
| fixed / none | time per token with each fixed number of drafts, divided by no drafter |
| adaptive / best fixed | speed with adaptive length, divided by the best fixed number's |

The best fixed number is taken from the other half of the rounds. Ratios with an error are medians
of rounds, and the error of their mean."""
TIMES_PLOT = "![time per token](drafters_speeds.png)"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def with_error(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.2f} kB"


def lengths(found: dict[str, Any]) -> str:
    head = ["drafter", "greedy, n = 3", "greedy, max", "T = 0.8, n = 3", "T = 0.8, max", "alpha"]
    names = "greedy_3", "greedy_most", "hot_3", "hot_most", "alpha"
    rows = [
        [name, *(number(arm["lengths"][one]) for one in names)]
        for name, arm in found.items()
        if "lengths" in arm
    ]
    return table(head, rows)


def costs(found: dict[str, Any]) -> str:
    head = ["drafter"] + [f"{name}, {num} rows" for num in ROWS for name in ("v", "c")]
    rows = []
    for name, arm in found.items():
        cells = [arm.get(f"parts {num}", {}) for num in ROWS]
        if any(cells):
            rows.append([name, *(number(cell.get(one)) for cell in cells for one in ("v", "c"))])
    return table(head, rows)


def speeds(found: dict[str, Any], num: int) -> str:
    """Return the table of times per token with ``num`` rows."""
    head = [f"drafter, {num} rows", "adaptive / none", "/ MTP, n = 3", "chain of 3 / MTP's"]
    head += ["fixed / none (drafts: time)", "adaptive / best fixed"]
    cell = f"speeds {num}"
    mtp = found.get(MTP, {}).get(cell, {}).get("held_of_none")
    rows = []
    for name, one in ((name, arm[cell]) for name, arm in found.items() if cell in arm):
        held = zip(one["nodes"], one["held_of_none"], strict=True)
        chain = found[name].get(f"beside {num}")
        rows.append(
            [
                name,
                number(one["of_none"]),
                number(mtp and one["of_none"] / mtp[CHAIN]),
                with_error(chain["time"], chain["error"]) if chain else "",
                ", ".join(f"{nodes}: {number(ratio)}" for nodes, ratio in held),
                with_error(one["adaptive_of_best"], one["error"]),
            ]
        )
    return table(head, rows)


def bytes_and_minutes(found: dict[str, Any]) -> str:
    head = ["drafter", "weights", "cache per token", "features per hand-over", "training, minutes"]
    rows = [
        [
            name,
            *(size(arm["bytes"][one]) for one in ("weights", "cache_per_token", "features")),
            number(arm.get("minutes"), 0),
        ]
        for name, arm in found.items()
        if "bytes" in arm
    ]
    return table(head, rows)


def lossy(found: dict[str, Any]) -> str:
    head = [
        "drafter",
        "acceptance",
        "tokens per step",
        "answers that differ",
        "nats per token of the text",
    ]
    rows = [
        [name, kind, number(one["length"]), f"{one['differ']:.0%}", number(one["nats"], 3)]
        for name, arm in found.items()
        for kind, one in arm.get("lossy", {}).items()
    ]
    return table(head, rows)


def plot_lengths(found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name, arm in found.items() if "lengths" in arm]
    for i, (one, label) in enumerate(
        (
            ("greedy_3", "greedy, n = 3"),
            ("greedy_most", "greedy, max"),
            ("hot_3", "T = 0.8, n = 3"),
        )
    ):
        at = [k + 0.27 * (i - 1) for k in range(len(names))]
        axes.bar(at, [found[name]["lengths"][one] for name in names], 0.25, label=label)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="tokens per step", ylim=(1, None))
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(RESULTS / "drafters_lengths.png", dpi=110)


def plot_speeds(found: dict[str, Any]) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=list(colormaps["tab20"](range(20))))
    for name, arm in found.items():
        nums = [num for num in ROWS if f"speeds {num}" in arm]
        if nums:
            axes.plot(
                nums, [arm[f"speeds {num}"]["of_none"] for num in nums], marker="o", label=name
            )
    axes.axhline(1, color="black", linestyle=":")
    axes.set(
        xlabel="rows", ylabel="time per token, adaptive / no drafts", xscale="log", ylim=(0, None)
    )
    axes.set_xticks(ROWS, [str(num) for num in ROWS])
    axes.legend(fontsize=7)
    figure.savefig(RESULTS / "drafters_speeds.png", dpi=110)


def write(kept: dict[str, Any], source: str) -> None:
    """Write the tables and plots into the page, between its marks.

    ``source`` is a line with the command, date and machine.
    """
    found = kept["arms"]
    timed = [num for num in ROWS if any(f"speeds {num}" in arm for arm in found.values())]
    again = kept.get("repeated", {})
    repeats = ", ".join(f"{share:.2f} {TEXTS[name]}" for name, share in again.items())
    parts = [
        source,
        "### Tokens per step",
        "100 held-out prompts, answers of 128 tokens. Columns: three drafts, and the maximum "
        "number. Alpha is the share of first drafts that rejection sampling accepts.",
        f"Share of the answers' 8-grams that the text already contained: {repeats}.",
        lengths(found),
        "![tokens per step](drafters_lengths.png)",
        "### Cost of verification and drafting",
        "Time to verify three drafts (v; n-gram + MTP: six) and to make them (c), divided by the "
        "time of a step without drafts.",
        costs(found),
        *([TIMES, *(speeds(found, num) for num in timed), TIMES_PLOT] if timed else []),
        "### Size and training",
        bytes_and_minutes(found),
        "### Lossy acceptance",
        "Relaxed: top 4, delta 0.3, greedy. Typical: epsilon 0.09, alpha 0.3, T = 0.8.",
        lossy(found),
    ]
    plot_lengths(found)
    if timed:
        plot_speeds(found)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    text = "\n\n".join(parts)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
