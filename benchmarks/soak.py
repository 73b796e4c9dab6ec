"""Many requests of all shapes at once, and every answer checked.

    python -m benchmarks.soak [--num-requests 1000] [--in-flight 64] [--cancel 0.1] [--json]

Prompts of 1 to 1,500 tokens, mixed sampling and draft lengths, a pool small enough to preempt,
some streams dropped on the way. Afterwards every greedy answer is held against transformers
under the margin rule, every sampled one against the same request run alone without drafts, and
the nodes must hold nothing.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from cluster.client import AsyncClient
from cluster.commands.common import running_server
from cluster.config import TINY_MODEL, load
from tests.exact import near_ties
from training.corpus import held_out_prompts

MAX_PROMPT = 1500


@dataclass
class Tally:
    """What happened; ``answers`` are (prompt, options, token ids) of finished requests."""

    answers: list[tuple[list[int], dict[str, Any], list[int]]] = field(default_factory=list)
    num_cancelled: int = 0
    errors: list[str] = field(default_factory=list)


def options(generator: random.Random) -> dict[str, Any]:
    """Settings of one request: half greedy, half sampled in some way."""
    chosen: dict[str, Any] = {
        "max_tokens": generator.randint(1, 64),
        "max_drafts": generator.randint(0, 3),
        "ignore_eos": True,
    }
    if generator.random() < 0.5:
        chosen |= {
            "temperature": generator.uniform(0.3, 1.2),
            "seed": generator.getrandbits(40),
            "top_p": generator.choice([1.0, 0.9]),
            "top_k": generator.choice([0, 40]),
        }
    return chosen


async def ask(
    client: AsyncClient, ids: list[int], chosen: dict[str, Any], tally: Tally, cancel_after: int
) -> None:
    """One request; its stream is dropped after ``cancel_after`` pieces, never if negative."""
    tokens: list[int] = []
    stream = client.generate(ids, **chosen)
    try:
        async for piece in stream:
            tokens += piece.token_ids
            if cancel_after == 0:
                tally.num_cancelled += 1
                return
            cancel_after -= 1
        tally.answers.append((ids, chosen, tokens))
    except Exception as error:
        tally.errors.append(f"{len(ids)} tokens, {chosen}: {error}")
    finally:
        await stream.aclose()


async def load_phase(client: AsyncClient, args: argparse.Namespace) -> Tally:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    prompts = held_out_prompts(tokenizer, args.num_requests, 1, MAX_PROMPT, seed=args.seed)
    generator, tally = random.Random(args.seed), Tally()
    gate = asyncio.Semaphore(args.in_flight)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=len(prompts))

        async def one(ids: list[int], chosen: dict[str, Any], cancel_after: int) -> None:
            async with gate:
                await ask(client, ids, chosen, tally, cancel_after)
            bar.advance(task)

        jobs = []
        for ids in prompts:
            dropped = generator.random() < args.cancel
            cancel_after = generator.randint(0, 8) if dropped else -1
            jobs.append(one(ids, options(generator), cancel_after))
        await asyncio.gather(*jobs)
    return tally


async def idle(client: AsyncClient) -> bool:
    """Whether the nodes hold nothing, within ten seconds."""
    for _ in range(100):
        nodes = (await client.status()).nodes
        held = [n.num_pages - 1 - n.num_free_pages + n.num_open_leases for n in nodes]
        if not any(held):
            return True
        await asyncio.sleep(0.1)
    return False


async def check_phase(client: AsyncClient, tally: Tally) -> dict[str, int]:
    """Wrong answers and near ties among the finished ones."""
    wrong = ties = 0
    with Progress(console=Console(stderr=True)) as bar:
        for ids, chosen, tokens in bar.track(tally.answers, description="checking"):
            if chosen.get("temperature"):
                alone = await client.complete(ids, **(chosen | {"max_drafts": 0}))
                wrong += list(alone.token_ids) != tokens
                continue
            try:
                ties += len(near_ties(TINY_MODEL, ids, tokens))
            except AssertionError as error:
                wrong += 1
                Console(stderr=True).print(str(error))
    return {"num_wrong": wrong, "num_near_ties": ties}


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    sets = ["server.address=127.0.0.1:0", "server.max_queued=2000", *args.sets]
    async with running_server(load(None, sets)) as server, AsyncClient(server.address) as client:
        began_at = time.perf_counter()
        tally = await load_phase(client, args)
        load_s = time.perf_counter() - began_at
        is_idle = await idle(client)
        checked = await check_phase(client, tally)
        return {
            "num_finished": len(tally.answers),
            "num_cancelled": tally.num_cancelled,
            "num_errors": len(tally.errors),
            "errors": tally.errors[:5],
            "num_tokens": sum(len(tokens) for _, _, tokens in tally.answers),
            "load_s": round(load_s, 1),
            "nothing_left": is_idle and await idle(client),
            **checked,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Load the server with all shapes and check it.")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--cancel", type=float, default=0.1, help="share of dropped streams")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    result = asyncio.run(soak(args))
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            Console().print(f"{name:>15}  {value}")
    if result["num_errors"] or result["num_wrong"] or not result["nothing_left"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
