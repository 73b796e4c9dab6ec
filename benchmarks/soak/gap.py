"""How long streams stall when their decode rank is killed, and how soon all ranks are back.

    python -m benchmarks.soak.gap [--kills 10] [--streams 8] [--num-tokens 512] [--gangs]

One prefill and two decode ranks, or gangs of two ranks. Half of the tokens are the prompt, half the
answer. Streams run on both decode ranks, then one rank is killed.

The command reports each stream's longest time between two pieces after the kill, for the killed
rank and for the other one. It also reports the time until all ranks work together again. That is
the time for imports and for loading the checkpoint.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.harness.procs import actors
from benchmarks.soak.__main__ import show
from tandem import AsyncClient
from tandem.cluster.control.launch import launch
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.core.config import TINY_MODEL, load
from training.corpus import held_out_prompts

SETS = (
    *("server.address=127.0.0.1:0", "decode.replicas=2", "speculation.profile_at_startup=false"),
    "kv.num_pages=600",
)
LOOK_S = 0.005


class Stream:
    """One stream, with the moments of its pieces."""

    def __init__(self, client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        self.moments: list[float] = []
        self.num_tokens = 0
        options: Any = {"max_tokens": num_tokens, "ignore_eos": True}
        self.task = asyncio.create_task(self._read(client.generate(prompt, **options)))

    async def _read(self, pieces: Any) -> None:
        async for piece in pieces:
            self.moments.append(time.monotonic())
            self.num_tokens += len(piece.token_ids)

    def gap_s(self, since: float) -> float:
        """Return the longest time between two pieces, the later of which came after ``since``."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return max((b - a for a, b in pairs if b > since), default=0.0)


async def one_kill(
    gateway: ClusterGateway, address: str, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[float], float, float]:
    """Return the gaps of all streams after the kill, the moment of the kill, and the moment when
    all ranks were back."""
    num_pairs = len(gateway.fleet.usable_pairs())
    async with AsyncClient(address) as client:
        streams = [Stream(client, prompt, num_tokens) for prompt in prompts]
        while any(stream.num_tokens < num_tokens // 4 for stream in streams):
            await asyncio.sleep(LOOK_S)
        victim = random.choice(actors(os.getpid(), "DecodeActor"))
        killed_at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*(stream.task for stream in streams))
        assert all(stream.num_tokens == num_tokens for stream in streams)
    while len(gateway.fleet.usable_pairs()) < num_pairs:
        await asyncio.sleep(LOOK_S)
    return [stream.gap_s(killed_at) for stream in streams], killed_at, time.monotonic()


async def gaps(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    half, num = args.num_tokens // 2, 2 * args.streams
    layout = ["prefill.dp_size=2", "decode.dp_size=2"] if args.gangs else []
    config = load(None, [*SETS, f"decode.max_num_seqs={num}", *layout, *args.sets])
    affected, others, back_s = list[float](), list[float](), list[float]()
    async with Server(config) as server, launch(config) as gateway:
        await server.attach(gateway)
        with Progress(console=Console(stderr=True)) as bar:
            for i in bar.track(range(args.kills), description="killing"):
                prompts = held_out_prompts(tokenizer, num, half, half, i)
                found, killed_at, back_at = await one_kill(gateway, server.address, prompts, half)
                found.sort(reverse=True)
                affected += found[: args.streams]
                others += found[args.streams :]
                back_s.append(back_at - killed_at)
        await server.stop()
    return {
        "kills": args.kills,
        "gap of its streams": quantiles(affected),
        "gap of the others": quantiles(others),
        "all back": quantiles(back_s),
    }


def quantiles(values_s: Sequence[float]) -> str:
    values = sorted(values_s)
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    return f"p50 {statistics.median(values):.2f} s, p99 {p99:.2f} s of {len(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.gap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=int, default=10, help="number of kills [10]")
    add("--streams", type=int, default=8, help="streams on each decode rank [8]")
    add("--num-tokens", type=int, default=512, help="prompt and answer together [512]")
    add("--gangs", action="store_true", help="gangs of two ranks instead of single ranks")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    show(asyncio.run(gaps(parser.parse_args())))


if __name__ == "__main__":
    main()
