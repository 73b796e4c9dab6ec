"""What prompts that arrive do to answers that are being written: prefill on one core, decode on the
other, client, gateway and Ray on prefill's.

    python -m benchmarks.interference [--share 0.7] [--requests 40] [--json]

Prompts arrive at random times, at a share of what prefill can read. Their answers' inter-token
latency stands beside that of the same decode rank with as many rows and no prompt in sight: each
interval is weighed by how often so many rows were active. The interval before a second token,
which has the hand-over in it, is told apart.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.driven.held_out import held_out
from benchmarks.driven.procs import serving
from benchmarks.versus.engines.tandem_served import pin_sides, run_batch, settings
from benchmarks.versus.job import Job, Timeline, Trial
from benchmarks.versus.loads import Load
from benchmarks.versus.measures import by_sequence
from tandem.cluster.client.client import AsyncClient
from tandem.core.config import TINY_MODEL

PROMPT_TOKENS = 1024
MAX_TOKENS = 128
NUM_AT_ONCE = 6
"""Prompts that show what prefill can read."""
SHARES = (0.5, 0.9, 0.99, 0.999)

Interval = tuple[float, int, bool]
"""Milliseconds between two pieces of an answer, the answers that were being written at its end, and
whether it has the hand-over in it."""


def intervals(timeline: Timeline) -> Iterator[Interval]:
    of = {i: [event.at_s for event in own] for i, own in by_sequence(timeline.events).items()}
    for own in of.values():
        for k, (before, at) in enumerate(pairwise(own)):
            num_rows = sum(times[0] < at <= times[-1] for times in of.values())
            yield 1e3 * (at - before), num_rows, k == 0


def quantiles(weighed: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of (value, weight)."""
    ordered, whole = sorted(weighed), sum(weight for _, weight in weighed)
    found, seen, wanted = {}, 0.0, list(SHARES)
    for value, weight in ordered:
        seen += weight
        while wanted and seen >= wanted[0] * whole * (1 - 1e-9):
            found[f"p{100 * wanted.pop(0):g}_ms"] = value
    return found


async def measured(address: str, trial: Trial, share: float) -> dict[str, Any]:
    [prompts], at_once = trial.batches, replace(trial, arrivals_s=[])
    async with AsyncClient(address, retry_s=0) as client:
        await run_batch(client, trial.warming(), trial.warm_up)
        some = held_out(NUM_AT_ONCE, PROMPT_TOKENS, PROMPT_TOKENS, seed=98)
        told = await run_batch(client, replace(at_once, max_tokens=2), some)
        per_s = NUM_AT_ONCE / max(own[0].at_s for own in by_sequence(told.events).values())
        load = Load(PROMPT_TOKENS, len(prompts), 0.0, MAX_TOKENS, share * per_s)
        arriving = replace(trial, arrivals_s=load.arrivals_s())
        arrived = list(intervals(await run_batch(client, arriving, prompts)))
        rows = Counter(num_rows for _, num_rows, is_first in arrived if not is_first)
        alone: list[tuple[float, float]] = []
        for num_rows, weight in sorted(rows.items()):
            found = intervals(await run_batch(client, at_once, prompts[:num_rows]))
            same = [ms for ms, num, is_first in found if num == num_rows and not is_first]
            assert same, f"{num_rows} answers sent at once were never written at once"
            alone += [(ms, weight / len(same)) for ms in same]
    return {
        "prompts_per_s_most": per_s,
        "prompts_per_s": share * per_s,
        "rows": {str(num): rows[num] for num in sorted(rows)},
        "arrived": quantiles([(ms, 1.0) for ms, _, _ in arrived]),
        "but_hand_overs": quantiles([(ms, 1.0) for ms, _, is_first in arrived if not is_first]),
        "hand_overs": quantiles([(ms, 1.0) for ms, _, is_first in arrived if is_first]),
        "alone": quantiles(alone),
    }


def show(console: Console, result: dict[str, Any]) -> None:
    rate, most = result["prompts_per_s"], result["prompts_per_s_most"]
    title = f"{rate:.2f} prompts of {PROMPT_TOKENS} tokens a second, of {most:.2f} at most"
    table = Table(title=title)
    table.add_column("ITL, ms")
    for share in SHARES:
        table.add_column(f"p{100 * share:g}", justify="right")
    names = {
        "arrived": "all",
        "but_hand_overs": "after the second token",
        "hand_overs": "before it",
        "alone": "as many rows, no prompts",
    }
    for name, told in names.items():
        table.add_row(told, *(f"{value:.1f}" for value in result[name].values()))
    console.print(table)
    alone = result["alone"]["p99_ms"]
    for name in ("arrived", "but_hand_overs"):
        console.print(f"p99, {names[name]}: {result[name]['p99_ms'] / alone:.2f} times that alone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=0.7, help="of what prefill can read [0.7]")
    parser.add_argument("--requests", type=int, default=40, help="[40]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not 0 < args.share < 1:
        parser.error(f"--share {args.share}: more than 0, less than 1, or prompts queue for ever")
    if args.requests < 2:
        parser.error(f"--requests {args.requests}: at least 2")
    prompts, warm_up = (
        held_out(num, PROMPT_TOKENS, PROMPT_TOKENS, seed)
        for num, seed in ((args.requests, 17), (4, 99))
    )
    trial = Trial("arrivals", warm_up, [prompts], MAX_TOKENS, ignore_eos=True, arrivals_s=[0.0])
    job = Job(str(TINY_MODEL), "bfloat16", 0, 2, [0, 1], [trial], {"mode": "split"})
    with serving(*settings(job)) as server:
        pin_sides(job, server.process.pid)
        result = asyncio.run(measured(server.address, trial, args.share))
    if args.json:
        print(json.dumps(result))
    else:
        show(Console(), result)


if __name__ == "__main__":
    main()
