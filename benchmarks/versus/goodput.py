"""Requests per second served within limits, where they arrive at their own times."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.versus.arms import VLLM
from benchmarks.versus.results import Result

SLACK = 2.0
"""Limit for ITL divided by the fastest vLLM arm's median at one sequence."""


@dataclass(frozen=True)
class Limits:
    """Limits of TTFT and of the p99 of its ITL that a request must keep to count.

    The default for ITL is SLACK times the minimum median of vLLM's arms at one sequence.
    """

    ttft_ms: float = 2000.0
    itl_ms: float | None = None

    def of(self, results: Sequence[Result]) -> "Limits | None":
        """Return the limits for one checkpoint's results; None if the limit of ITL is unknown."""
        alone = [r for r in results if r.family == VLLM and r.num_sequences == 1 and not r.error]
        medians = [r.median("itl_p50_ms") for r in alone]
        known = [self.itl_ms] if self.itl_ms else [SLACK * one for one in medians if one]
        return Limits(self.ttft_ms, min(known)) if known else None

    def kept(self, result: Result) -> float:
        """Return the requests per second of all batches that kept both limits."""
        assert self.itl_ms is not None
        num = sum(
            ttft <= self.ttft_ms and itl <= self.itl_ms
            for batch in result.batches
            for ttft, itl in batch["requests"]
        )
        return num / sum(batch["span_s"] for batch in result.batches)


def by_arm(results: Sequence[Result], limits: Limits) -> dict[str, dict[float, float]]:
    """Return the goodput of each arm at each rate."""
    lines: dict[str, dict[float, float]] = {}
    for result in sorted(results, key=lambda r: r.rate_per_s):
        if result.rate_per_s and result.rounds:
            lines.setdefault(result.arm, {})[result.rate_per_s] = limits.kept(result)
    return lines
