"""What ``kv_transfer.checksums`` costs a request that is alone: two clusters, with and without,
asked in turns.

    python -m benchmarks.checksums [--requests 40] [--num-tokens 1024] [--json]

Told are the time to the first token, which prefill has, and from it to the second, which has the
hand-over in it; medians, of prompts that nobody has read before.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.driven.held_out import held_out
from benchmarks.driven.procs import serving
from tandem import AsyncClient

SETS = "prefill.replicas=1", "decode.replicas=1", "speculation.drafter=none"
WAYS = "without", "with"
NUM_WARMING = 4


async def asked(client: AsyncClient, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds to the first token, and from there to the second."""
    at = [time.perf_counter()]
    async for _ in client.generate(prompt, max_tokens=2, ignore_eos=True):
        at.append(time.perf_counter())
    return 1e3 * (at[1] - at[0]), 1e3 * (at[2] - at[1])


async def measured(addresses: list[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    prompts = held_out(NUM_WARMING + args.requests, args.num_tokens, args.num_tokens, seed=31)
    first, second = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    clients = [AsyncClient(address, retry_s=0) for address in addresses]
    with Progress(console=Console(stderr=True)) as bar:
        for i, prompt in enumerate(bar.track(prompts, description="requests")):
            ways = [*zip(WAYS, clients, strict=True)][:: 1 if i % 2 else -1]
            for way, client in ways:
                times = await asked(client, prompt)
                if i >= NUM_WARMING:
                    first[way].append(times[0])
                    second[way].append(times[1])
    for client in clients:
        await client.close()
    told = {"to the first token, ms": first, "to the second, ms": second}
    return {
        name: {way: statistics.median(by_way[way]) for way in WAYS} for name, by_way in told.items()
    }


def show(result: dict[str, dict[str, Any]]) -> None:
    table = Table("medians", *WAYS, "more")
    for name, by_way in result.items():
        without, checked = (by_way[way] for way in WAYS)
        table.add_row(name, f"{without:.2f}", f"{checked:.2f}", f"{checked - without:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40, help="of each cluster [40]")
    parser.add_argument("--num-tokens", type=int, default=1024, help="of a prompt [1024]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sums = "kv_transfer.checksums="
    with serving(*SETS, f"{sums}false") as plain, serving(*SETS, f"{sums}true") as checked:
        result = asyncio.run(measured([plain.address, checked.address], args))
    print(json.dumps(result)) if args.json else show(result)


if __name__ == "__main__":
    main()
