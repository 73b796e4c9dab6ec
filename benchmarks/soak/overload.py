"""Goodput with three times the requests that the cluster can carry, while ranks die.

    python -m benchmarks.soak.overload [--load 3] [--seconds 60] [--every 15]

First, slightly more clients than rows send one request after another. Their rate is the capacity of
all ranks. Then requests arrive at random times at ``--load`` times that rate. A random decode rank
is killed every ``--every`` seconds.

Goodput counts the tokens of whole answers. It is compared with the capacity of the surviving ranks,
by the share of decode ranks that were usable. A request refused with RESOURCE_EXHAUSTED was not
admitted; all others have to finish. The exit code is 1 if goodput is less than 0.8 of that
capacity, or if an admitted request failed.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.harness.procs import actors
from benchmarks.soak.__main__ import show
from tandem import AsyncClient, InferenceError
from tandem.cluster.control.launch import launch
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.core.config import TINY_MODEL, load
from tandem.core.info import DECODE
from training.corpus import held_out_prompts

SETS = (
    *("server.address=127.0.0.1:0", "decode.replicas=2", "speculation.profile_at_startup=false"),
    *("kv.num_pages=600", "decode.max_num_seqs=8", "server.max_queued=32"),
)
NUM_PROMPTS, PROMPT_LEN, NUM_TOKENS = 64, 128, 96
LOOK_S, LEAST = 0.05, 0.8


@dataclass
class Ends:
    """Outcomes of requests, the tokens of whole answers, and the end time of each."""

    num: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    num_tries: int = 0


class Asker:
    """Sends one prompt after another."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]]) -> None:
        self.ends = Ends()
        self._client, self._prompts = client, prompts
        self._draw = random.Random(0)
        generate = client._stub.Generate

        def counted(*given: Any, **more: Any) -> Any:
            self.ends.num_tries += 1
            return generate(*given, **more)

        client._stub.Generate = counted

    async def ask(self) -> None:
        prompt = self._draw.choice(self._prompts)
        try:
            done = await self._client.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
            self.ends.num["whole"] += 1
            self.ends.num_tokens += len(done.token_ids)
        except InferenceError as error:
            is_refused = error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            self.ends.num["refused at the door" if is_refused else "failed"] += 1
            if not is_refused:
                self.ends.failures.append(str(error))


async def carried(asker: Asker, num_clients: int, for_s: float) -> float:
    """Return the tokens per second with ``num_clients`` clients."""
    until = time.monotonic() + for_s

    async def go_on() -> None:
        while time.monotonic() < until:
            await asker.ask()

    began_at = time.monotonic()
    await asyncio.gather(*(go_on() for _ in range(num_clients)))
    return asker.ends.num_tokens / (time.monotonic() - began_at)


async def share_usable(gateway: ClusterGateway, shares: list[float]) -> None:
    """Record the usable share of decode ranks repeatedly."""
    num = len(gateway.fleet.of_kind(DECODE))
    while True:
        usable = {decode.epoch_name for _, decode in gateway.fleet.usable_pairs()}
        shares.append(len(usable) / num)
        await asyncio.sleep(LOOK_S)


async def kill_some(every_s: float, killed: list[int]) -> None:
    while True:
        await asyncio.sleep(every_s)
        if found := actors(os.getpid(), "DecodeActor"):
            killed.append(random.choice(found))
            with suppress(ProcessLookupError):
                os.kill(killed[-1], signal.SIGKILL)


async def overload(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    prompts = held_out_prompts(tokenizer, NUM_PROMPTS, PROMPT_LEN, PROMPT_LEN, 0)
    config = load(None, [*SETS, *args.sets])
    num_rows = config.decode.max_num_seqs * config.decode.replicas
    async with Server(config) as server, launch(config) as gateway:
        await server.attach(gateway)
        async with AsyncClient(server.address) as client:
            capacity = await carried(Asker(client, prompts), num_rows + 4, args.seconds / 3)
        async with AsyncClient(server.address) as client:
            asker, shares, killed = Asker(client, prompts), list[float](), list[int]()
            watching = asyncio.create_task(share_usable(gateway, shares))
            killing = asyncio.create_task(kill_some(args.every, killed))
            tasks = []
            rate, began_at = args.load * capacity / NUM_TOKENS, time.monotonic()
            with Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task("overload", total=args.seconds)
                while (now_s := time.monotonic() - began_at) < args.seconds:
                    tasks.append(asyncio.create_task(asker.ask()))
                    bar.update(task, completed=now_s)
                    await asyncio.sleep(random.expovariate(rate))
            goodput = asker.ends.num_tokens / (time.monotonic() - began_at)
            living = capacity * sum(shares) / len(shares)
            killing.cancel()
            watching.cancel()
            num_asked = len(tasks)
            await asyncio.gather(*tasks)
        await server.stop()
    return {
        "all ranks carry": f"{capacity:.0f} tokens/s",
        "asked": f"{num_asked} requests, {args.load:g} times as many as that",
        "killed": len(killed),
        "usable": f"{sum(shares) / len(shares):.2f} of the decode ranks",
        "goodput": f"{goodput:.0f} tokens/s",
        "of what lived": round(goodput / living, 2),
        "ends": dict(asker.ends.num),
        "tries per request": round(asker.ends.num_tries / num_asked, 2),
        "failures": asker.ends.failures[:5],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--load", type=float, default=3.0, help="request rate divided by the capacity [3]")
    add("--seconds", type=float, default=60.0, help="duration of the overload [60]")
    add("--every", type=float, default=15.0, help="seconds between kills [15]")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    result = asyncio.run(overload(parser.parse_args()))
    show(result)
    sys.exit(result["of what lived"] < LEAST or bool(result["failures"]))


if __name__ == "__main__":
    main()
