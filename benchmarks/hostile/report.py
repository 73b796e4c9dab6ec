"""Tables, JSON and bounds of rounds with hostile clients."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.hostile.honest import Figures
from benchmarks.hostile.rounds import Measured

MAX_TTFT_RATIO = 2.0
MAX_ITL_RATIO = 1.5
MAX_GROWN_MB = 20.0
MAX_SHOWN = 5
"""Errors of a kind that JSON names."""


def quantiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds, NaN where there are no values."""
    if len(values_s) < 2:
        return {"p50": float("nan"), "p99": float("nan")}
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}


def times(figures: Figures) -> dict[str, Any]:
    """Return the number of requests and the quantiles of their times."""
    return {
        "num_requests": len(figures.ttfts_s),
        "ttft_ms": quantiles_ms(figures.ttfts_s),
        "itl_ms": quantiles_ms(figures.gaps_s),
    }


def summary(measured: Measured) -> dict[str, Any]:
    """Return the figures of one kind, as JSON has them."""
    hostile, control = times(measured.hostile), times(measured.control)
    return {
        "kind": measured.kind,
        "hostile": hostile,
        "control": control,
        "ttft_p99_ratio": hostile["ttft_ms"]["p99"] / control["ttft_ms"]["p99"],
        "itl_p99_ratio": hostile["itl_ms"]["p99"] / control["itl_ms"]["p99"],
        "num_refused": len(measured.hostile.refused),
        "num_turned_away": len(measured.hostile.turned_away),
        "num_failed_probes": len(measured.hostile.failed_probes),
        "errors": [
            *measured.hostile.refused[:MAX_SHOWN],
            *measured.hostile.turned_away[:MAX_SHOWN],
            *measured.hostile.failed_probes[:MAX_SHOWN],
        ],
        "lost": measured.lost,
        "gateway_rss_mb": measured.rss_mb,
        "gateway_peaks_mb": measured.peaks_mb,
        "grown_mb": measured.grown_mb,
        "hostile_cpu_s_per_s": measured.hostile_rates,
        "gateway_cpu_s_per_s": measured.gateway_rates,
        "hostile_calls": dict(measured.counts),
    }


def is_within_bounds(found: dict[str, Any]) -> bool:
    """Return whether a kind hurts honest clients no more than its bounds allow."""
    is_fast = found["ttft_p99_ratio"] <= MAX_TTFT_RATIO and found["itl_p99_ratio"] <= MAX_ITL_RATIO
    is_served = not (found["num_refused"] or found["lost"])
    return is_fast and is_served and found["grown_mb"] <= MAX_GROWN_MB


def time_table(found: Sequence[dict[str, Any]], alone: dict[str, Any]) -> Table:
    """Return the times of honest requests with each kind, with its control, and alone."""
    shown = Table(title="honest streams, p50 / p99 in ms")
    columns = ("TTFT", "control", "ratio of p99", "ITL", "control", "ratio of p99")
    for column in ("beside", "requests", *columns):
        shown.add_column(column, justify="right")
    for one in found:
        row = [one["kind"], str(one["hostile"]["num_requests"])]
        for name in ("ttft", "itl"):
            row += [_pair(one[side][f"{name}_ms"]) for side in ("hostile", "control")]
            row.append(f"{one[f'{name}_p99_ratio']:.2f}")
        shown.add_row(*row)
    num = str(alone["num_requests"])
    shown.add_row("nothing", num, _pair(alone["ttft_ms"]), "", "", _pair(alone["itl_ms"]), "", "")
    return shown


def harm_table(found: Sequence[dict[str, Any]]) -> Table:
    """Return what else a kind did to the gateway and its clients."""
    shown = Table(title="what else it did, and what it cost")
    for column in ("beside", "refused", "new clients refused", "probes failed", "ranks lost"):
        shown.add_column(column, justify="right")
    for column in ("gateway MB by round", "peak", "2nd to 5th", "CPU: client", "gateway"):
        shown.add_column(column, justify="right")
    for one in found:
        names = ("num_refused", "num_turned_away", "num_failed_probes")
        rates = (one["hostile_cpu_s_per_s"], one["gateway_cpu_s_per_s"])
        shown.add_row(
            one["kind"],
            *(str(one[name]) for name in names),
            str(len(one["lost"])),
            " ".join(f"{mb:.0f}" for mb in one["gateway_rss_mb"]),
            f"{max(one['gateway_peaks_mb']):.0f}",
            f"{one['grown_mb']:+.1f}",
            *(f"{statistics.fmean(values):.2f}" for values in rates),
        )
    return shown


def _pair(quantiles: dict[str, float]) -> str:
    return f"{quantiles['p50']:.1f} / {quantiles['p99']:.1f}"
