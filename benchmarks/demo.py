"""The main job on real input: a local cluster answers prompts over gRPC.

    make demo            (or: python -m benchmarks.demo [--set key=value ...])
    make gang            the same with gangs of two ranks

Starts Ray with one prefill node and one decode node, continues pieces of Python files that the
shipped checkpoint was not trained on, and shows what each answer cost and what the nodes did.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from cluster.commands.common import running_server
from cluster.commands.status import rank_table
from core.config import load
from tandem import AsyncClient, Finished

PROMPTS = (
    "import argparse\nimport sys\n\n\ndef main(argv=None):\n    parser = ",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n',
    "def read_config(path):\n    with open(path, encoding='utf-8') as f:\n",
)
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Row:
    """One answered prompt; times in milliseconds as the client saw them."""

    first_token_ms: float
    per_token_ms: float
    finished: Finished


async def answer(client: AsyncClient, console: Console, prompt: str) -> Row:
    """Stream one answer to the console: the prompt dim, the new text bright."""
    console.print(prompt, end="", style="dim", markup=False, highlight=False)
    started_at, first_at = time.perf_counter(), None
    async for piece in client.generate(prompt, max_tokens=MAX_TOKENS):
        if isinstance(piece, Finished):
            ended_at = time.perf_counter()
            console.print("\n")
            assert first_at is not None, "an answer has at least one token"
            num_later = max(piece.usage.completion - 1, 1)
            return Row(
                (first_at - started_at) * 1e3, (ended_at - first_at) / num_later * 1e3, piece
            )
        first_at = first_at or time.perf_counter()
        console.print(piece.text, end="", style="bold cyan", markup=False, highlight=False)
    raise AssertionError("the stream ended without its last message")


def summary(rows: list[Row], ready_s: float) -> Table:
    table = Table(title=f"cluster ready after {ready_s:.1f} s")
    columns = ("prompt", "answer", "TTFT", "per token", "accepted length", "KV pulled", "rate")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        counts, moved = row.finished.speculation, row.finished.kv_transfer
        num_later = row.finished.usage.completion - 1
        rate = moved.bytes / moved.seconds / 1e6 if moved.seconds else 0.0
        table.add_row(
            f"{row.finished.usage.prompt} tokens",
            f"{row.finished.usage.completion} tokens",
            f"{row.first_token_ms:.0f} ms",
            f"{row.per_token_ms:.1f} ms",
            f"{num_later / counts.num_steps:.2f}" if counts.num_steps else "-",
            f"{moved.bytes / 1e6:.2f} MB",
            f"{rate:.0f} MB/s ({moved.backend})",
        )
    return table


async def demo(sets: list[str]) -> None:
    console = Console()
    started_at = time.perf_counter()
    config = load(None, ["server.address=127.0.0.1:0", *sets])
    async with running_server(config) as server, AsyncClient(server.address) as client:
        ready_s = time.perf_counter() - started_at
        info = await client.model_info()
        status = await client.status()
        console.print(f"[green]ready[/] grpc={server.address}  model {info.name} ({info.dtype})")
        console.print("ranks:", ", ".join(sorted(rank.name for rank in status.ranks)), "\n")
        rows = [await answer(client, console, prompt) for prompt in PROMPTS]
        console.print(summary(rows, ready_s))
        console.print(rank_table(await client.status()), "\n")
        console.print("tandem serve, tandem generate, tandem status: see --help of each.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Start a local cluster and answer prompts.")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    asyncio.run(demo(parser.parse_args().sets))


if __name__ == "__main__":
    main()
