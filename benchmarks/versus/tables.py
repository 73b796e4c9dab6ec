"""Tables for the screen and for Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.versus.arms import PEERS
from benchmarks.versus.goodput import Limits, by_arm
from benchmarks.versus.ratios import PREFILL, TPOT, TTFT, Ratio, all_ratios
from benchmarks.versus.results import Result

TITLES = {
    TPOT: "time per output token of one sequence, steady decode, ms",
    PREFILL: "prefill: until every sequence has its first token, ms",
    TTFT: "TTFT, mean, ms",
    "tokens_per_s": "throughput, prefill included, tokens per second",
    "itl_p50_ms": "inter-token latency, median, ms",
    "itl_p99_ms": "inter-token latency, p99, ms",
}


RATIOS = {TPOT: "time per output token", PREFILL: "prefill time", TTFT: "TTFT"}
"""Names of the measures that are compared with each peer."""


@dataclass(frozen=True)
class Grid:
    title: str
    header: list[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.header, ["---"] + ["--:"] * (len(self.header) - 1), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title[:1].upper()}{self.title[1:]}\n\n{body}\n"


def all_grids(results: Sequence[Result], limits: Limits) -> list[Grid]:
    grids = []
    for checkpoint, dtype in dict.fromkeys((r.checkpoint, r.dtype) for r in results):
        own = [r for r in results if (r.checkpoint, r.dtype) == (checkpoint, dtype)]
        where = f"{checkpoint}, {dtype}"
        grids += [medians(own, measure, f"{title} ({where})") for measure, title in TITLES.items()]
        for family in PEERS:
            grids += [ratios(own, measure, family, where) for measure in RATIOS]
        grids += [lengths(own, where), repeats(own, where), goodput(own, limits, where)]
        grids.append(failures(own, where))
    return [grid for grid in grids if grid.rows]


def medians(results: Sequence[Result], measure: str, title: str) -> Grid:
    return _by_load(results, title, lambda r: _figure(r.median(measure)))


def lengths(results: Sequence[Result], where: str) -> Grid:
    drafting = [r for r in results if r.num_drafts]
    title = f"mean accepted length, the model's own token included ({where})"
    return _by_load(drafting, title, lambda r: _figure(r.accepted_length))


def repeats(results: Sequence[Result], where: str) -> Grid:
    title = f"share of repeated 8-grams in the answers ({where})"
    return _by_load(results, title, lambda r: _figure(r.median("repeated_ngrams")))


def goodput(results: Sequence[Result], limits: Limits, where: str) -> Grid:
    """Return the best goodput of each arm, and its rate."""
    found, rows = limits.of(results), []
    lines = by_arm(results, found) if found else {}
    rates = sorted({rate for line in lines.values() for rate in line})
    for arm, line in lines.items():
        cells = [_figure(line.get(rate)) for rate in rates]
        rows.append([arm, *cells, _figure(max(line.values()))])
    title = "goodput in requests per second, by arrival rate"
    if found:
        title += f": TTFT at most {found.ttft_ms:.0f} ms, p99 of ITL {found.itl_ms:.1f} ms"
    return Grid(f"{title} ({where})", ["arm", *(f"{rate:g}/s" for rate in rates), "best"], rows)


def _by_load(results: Sequence[Result], title: str, cell: Callable[[Result], str]) -> Grid:
    good = [r for r in results if r.rounds]
    loads = list(dict.fromkeys(r.load for r in sorted(good, key=_size)))
    arms = list(dict.fromkeys(r.arm for r in good))
    at = {(r.arm, r.load): cell(r) + ("*" if r.about.get("is_busy") else "") for r in good}
    rows = [[arm, *(at.get((arm, load), "") for load in loads)] for arm in arms]
    return Grid(title, ["arm", *loads], rows)


def _size(result: Result) -> tuple[float, int, int]:
    return result.temperature, result.prompt_tokens, result.num_sequences


def ratios(results: Sequence[Result], measure: str, family: str, where: str) -> Grid:
    fastest = f"{PEERS[family]}'s fastest"
    header = ["arm", "load", "same n", fastest, "any n", fastest, "lengths agree"]
    found = [one for one in all_ratios(results, measure, family) if one.best is not None]
    title = f"{RATIOS[measure]} divided by {PEERS[family]}'s ({where})"
    return Grid(title, header, [_ratio_row(one) for one in found])


def _ratio_row(one: Ratio) -> list[str]:
    agrees = {None: "", True: "yes", False: "NO: does not count"}[one.agrees]
    if one.measure != TPOT:
        agrees = ""
    same = [_figure(one.same_n), one.same_n_peer or ""]
    return [one.result.arm, one.result.load, *same, _figure(one.best), one.best_peer or "", agrees]


def failures(results: Sequence[Result], where: str) -> Grid:
    failed = [r for r in results if r.error is not None]
    rows = [[r.arm, r.load, (r.error or "").replace("|", "/")[:160]] for r in failed]
    return Grid(f"failed ({where})", ["arm", "load", "error"], rows)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
