"""The main use case on real input: a local cluster answers prompts over gRPC.

    make demo       (or: python -m benchmarks.demo [--set key=value ...])
    make gang       the same with gangs of two ranks

Starts Ray with one prefill node and one decode node, and continues pieces of Python. The shipped
checkpoint was trained on the standard library. Then prints the cost of each answer and the work of
the nodes.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tandem import AsyncClient, Finished
from tandem.cluster.client.options import GenerateOptions
from tandem.cluster.commands.common import run_server
from tandem.cluster.commands.status import rank_table
from tandem.core.config import load


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, for at most ``max_tokens`` and up to one of the ``stop`` strings."""

    text: str
    max_tokens: int
    stop: tuple[str, ...] = ()


PROMPTS = (
    Prompt(
        "import codecs\n\n### Codec APIs\n\nclass Codec(codecs.Codec):\n\n"
        "    def encode(self,input,errors='strict'):\n        return",
        max_tokens=320,
    ),
    Prompt(
        "    '1'        #  0x31 -> DIGIT ONE\n"
        "    '2'        #  0x32 -> DIGIT TWO\n"
        "    '3'        #",
        max_tokens=160,
        stop=("    ':'",),
    ),
    Prompt(
        "    def send(self, data):\n        if self.closed:\n            raise ValueError(",
        max_tokens=64,
        stop=("\n\n",),
    ),
)
"""Prompts that suit the shipped checkpoint: a module of the standard library that ends by itself, a
table of one, and a method."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answered prompt; times in milliseconds as seen by the client."""

    first_token_ms: float
    per_token_ms: float
    finished: Finished


async def answer(client: AsyncClient, console: Console, prompt: Prompt) -> Row:
    """Stream one answer to the console: the prompt dim, the new text bright."""
    console.print(prompt.text, end="", style="dim", markup=False, highlight=False)
    started_at, first_at = time.perf_counter(), None
    how: GenerateOptions = {"max_tokens": prompt.max_tokens, "stop": prompt.stop}
    async for piece in client.generate(prompt.text, **how):
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
    async with run_server(config) as server, AsyncClient(server.address) as client:
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
