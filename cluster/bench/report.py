"""Results as tables for people, and as one JSON object for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple

from rich.console import Console
from rich.table import Table

from tandem.cluster.bench.experiment import Arm, Speedups
from tandem.cluster.bench.options import BenchOptions
from tandem.cluster.bench.stats import Distribution, Metrics
from tandem.core.info import ModelInfo

LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_message_ms": "time between messages",
    "itl_token_ms": "time between tokens",
    "e2e_ms": "end-to-end latency",
    "lag_ms": "load generator's lag",
}


def as_json(
    options: BenchOptions, model: ModelInfo, arms: Sequence[Arm], ratios: Sequence[Speedups]
) -> str:
    """Return the result as a JSON object.

    Its form is ``{"options", "model", "runs": [{"max_drafts", "metrics", "acceptance",
    "speedup"}]}``.
    """
    runs = [
        {
            "max_drafts": arm.max_drafts,
            "metrics": asdict(arm.metrics),
            "acceptance": {**asdict(arm.acceptance), "first": arm.acceptance.first},
            "speedup": asdict(ratio),
        }
        for arm, ratio in zip(arms, ratios, strict=True)
    ]
    report = {"options": asdict(options), "model": asdict(model), "runs": runs}
    return json.dumps(report, default=str)


def show(
    console: Console,
    model: ModelInfo,
    arms: Sequence[Arm],
    ratios: Sequence[Speedups],
    options: BenchOptions,
) -> None:
    """Print the latencies and totals of each arm and, if any arm drafts, speculation results."""
    console.print(f"{model.name}  {model.architecture}  {model.dtype}", markup=False)
    for arm in arms:
        console.print()
        console.print(latency_table(arm))
        console.print(totals(arm.metrics))
    if any(arm.acceptance.num_drafts for arm in arms):
        console.print()
        console.print(speculation_table(arms, ratios, options.is_alpha_known))
        source = "measured in this run" if options.cost_ratio is None else "from --cost-ratio"
        if ratios[0].cost_ratio is None:
            source = "unknown; use --cost-ratio or --compare-drafts"
        console.print(
            "modelled speed-up: (1 - a^(n+1)) / ((1 - a)(n c + 1)) for n drafts, without waiting "
            f"times; c is {source}.\n"
            "TPOT also includes the time that an answer waits for its hand-over.",
            style="dim",
        )


def latency_table(arm: Arm) -> Table:
    """Return the latency distributions of an arm, in milliseconds."""
    title = f"{_drafts(arm)}: {arm.metrics.num_ok} answers in {arm.metrics.duration_s:.1f} s"
    table = _table("ms", ["mean", "p50", "p90", "p99"], title)
    for name, label in LATENCIES.items():
        distribution: Distribution | None = getattr(arm.metrics, name)
        table.add_row(
            label, *map(_number, [None] * 4 if distribution is None else astuple(distribution))
        )
    return table


def totals(metrics: Metrics) -> str:
    """Return lines of text with throughput, tokens, decode steps and failures."""
    failed = ", ".join(f"{num} {code}" for code, num in sorted(metrics.errors.items()))
    return (
        f"{metrics.requests_per_s:.2f} requests/s (goodput {metrics.goodput_per_s:.2f}/s), "
        f"tokens/s: in {metrics.input_tokens_per_s:.1f}, out {metrics.output_tokens_per_s:.1f}\n"
        f"tokens: prompt {metrics.num_prompt_tokens} (cached {metrics.num_cached_tokens}), "
        f"output {metrics.num_output_tokens}; KV transferred: {metrics.kv_bytes / 1e6:.1f} MB\n"
        f"{_steps(metrics)}\nrequests: sent {metrics.num_sent}, "
        f"not sent in time {metrics.num_not_sent}, failed {failed or 'none'}"
    )


def _steps(metrics: Metrics) -> str:
    use = metrics.use
    if metrics.host_share is None:
        return "decode steps: not reported by the ranks"
    return (
        f"decode steps: {use.num_steps:.0f}, {_number(use.step_ms)} ms each, host share "
        f"{metrics.host_share:.1%}; preemptions: {use.num_preempted:.0f}"
    )


def speculation_table(
    arms: Sequence[Arm], ratios: Sequence[Speedups], is_alpha_known: bool
) -> Table:
    """Return a table of measured and modelled speculation results, one column per arm.

    Alpha is shown for chains only, and only if ``is_alpha_known``.
    """
    table = _table("speculation", [_drafts(arm) for arm in arms], "")
    acceptances = [arm.acceptance for arm in arms]
    shares = [
        " ".join(f"{share:.1%}" for share in acceptance.per_position) or "-"
        for acceptance in acceptances
    ]
    table.add_row("accepted by position", *shares)
    alphas = [
        acceptance.alpha if is_alpha_known and acceptance.nodes_per_depth == 1 else None
        for acceptance in acceptances
    ]
    rows: dict[str, Sequence[float | None]] = {
        "drafts per step": [acceptance.nodes_per_step for acceptance in acceptances],
        "accepted length, tokens/step": [acceptance.accepted_length for acceptance in acceptances],
        "step, ms": [arm.metrics.step_ms for arm in arms],
        "acceptance a at position 1": [acceptance.first for acceptance in acceptances],
        "a fitted to accepted length": [acceptance.fitted for acceptance in acceptances],
        "alpha = E[sum min(p, q)]": alphas,
        "c, cost of a draft in steps": [ratio.cost_ratio for ratio in ratios],
        "modelled speed-up, position 1": [ratio.model_first for ratio in ratios],
        "modelled speed-up, fitted a": [ratio.model_fitted for ratio in ratios],
        "FLOPs per token vs no drafts": [ratio.operations for ratio in ratios],
        "memory reads saved, factor": [ratio.reads for ratio in ratios],
        "measured speed-up of TPOT": [ratio.measured for ratio in ratios],
    }
    for label, values in rows.items():
        table.add_row(label, *map(_number, values))
    rounds = [", ".join(map(_number, ratio.measured_per_round)) or "-" for ratio in ratios]
    table.add_row("  by round", *rounds)
    return table


def _drafts(arm: Arm) -> str:
    num = arm.acceptance.num_drafts if arm.max_drafts is None else arm.max_drafts
    return "no drafts" if num == 0 else f"up to {num} draft{'s' if num > 1 else ''}"


def _table(first: str, others: Sequence[str], title: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
