"""``tandem bench --compare``: the same load on one cluster per speculation setting."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tandem.cluster.bench.experiment import Arm, Trial
from tandem.cluster.bench.options import BenchOptions
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.commands.common import temporary_server
from tandem.core.config import load


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """Result of one compared cluster.

    Attributes:
        keys: Its speculation keys, as given on the command line.
        arm: Its runs and their results.
    """

    keys: str
    arm: Arm

    @property
    def tpot_ms(self) -> float:
        """Mean milliseconds per output token; infinite if no request succeeded."""
        mean = self.arm.metrics.tpot_ms
        return inf if mean is None else mean.mean


def set_options(options: BenchOptions, keys: str) -> list[str]:
    """Return the ``--set`` items of the cluster with the speculation keys ``keys``."""
    return [
        *(options.sets or []),
        *(f"speculation.{setting.strip()}" for setting in keys.split(",")),
    ]


async def compare(options: BenchOptions, progress: Progress) -> list[ComparisonResult]:
    """Run the load on one cluster after another, in order, all with the same prompts.

    Raises:
        ValueError: Some keys are invalid. Raised before the first cluster is started.
    """
    assert options.compare, "compare() needs at least one setting"
    for keys in options.compare:
        load(options.config, set_options(options, keys))
    results = []
    for keys in options.compare:
        async with (
            temporary_server(options.config, set_options(options, keys)) as address,
            AsyncClient(address, retry_s=0) as client,
        ):
            [arm] = await Trial(
                client=client, model=await client.model_info(), options=options, progress=progress
            ).run()
            results.append(ComparisonResult(keys, arm))
    return results


def show(console: Console, results: Sequence[ComparisonResult]) -> None:
    """Print a table with one row per cluster, and the fastest setting."""
    columns = "drafts", "tokens", "step ms", "ms/token", "p99", "tokens/s", "speed-up"
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("speculation", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    first = results[0].tpot_ms
    for result in results:
        metrics = result.arm.metrics
        acceptance = result.arm.acceptance
        tpot = metrics.tpot_ms
        values: list[float | None] = [
            acceptance.nodes_per_step,
            acceptance.accepted_length,
            metrics.step_ms,
        ]
        if tpot is None:
            values += [None] * 4
        else:
            speed_up = first / tpot.mean if isfinite(first) else None
            values += [tpot.mean, tpot.p99, metrics.output_tokens_per_s, speed_up]
        keys = result.keys.replace(",", ", ")
        table.add_row(keys, *("-" if value is None else f"{value:.2f}" for value in values))
    console.print(table)
    console.print(
        "drafts, tokens: mean per step. speed-up: ms/token of the first row / ms/token of the row.",
        style="dim",
    )
    best = min(results, key=lambda result: result.tpot_ms)
    if not isfinite(best.tpot_ms):
        return
    sets = " ".join(f"--set {item}" for item in set_options(BenchOptions(), best.keys))
    console.print(f"\nlowest ms/token on this machine with this load: {sets}", markup=False)
    console.print(
        "The best setting may differ for another load (--concurrency, prompts).", style="dim"
    )


def as_json(options: BenchOptions, results: Sequence[ComparisonResult]) -> str:
    """Return the JSON object ``{"options", "runs": [{"keys", "metrics", "acceptance"}]}``."""
    runs = [
        {
            "keys": result.keys,
            "metrics": asdict(result.arm.metrics),
            "acceptance": asdict(result.arm.acceptance),
        }
        for result in results
    ]
    return json.dumps({"options": asdict(options), "runs": runs}, default=str)
