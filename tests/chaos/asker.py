"""Run clients with default settings against both gateways, until a file ``stop`` exists.

    python -m tests.chaos.asker --address ipv4:A:P,B:P --folder DIR [--clients N] [--seed N]

Appends each answer to ``answers.jsonl``, and writes ``end.json`` at the end. With ``--poison S``,
every S seconds one client sends a request that kills its rank. The outcomes of these requests go to
``poison.jsonl``.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from tokenizers import Tokenizer

from benchmarks.soak.load import nothing_left
from tandem import AsyncClient, InferenceError
from tandem.core.config import TINY_MODEL
from tests.faults.sitecustomize import POISON
from training.corpus import held_out_prompts

NUM_REQUESTS, MAX_PROMPT, MIN_TOKENS, MAX_TOKENS = 24, 300, 40, 160
LOOK_S = 0.5
FULL_S = 1.0
"""Pause after a request that found a gateway full."""
LEFT_S = 60.0
"""Time in which leases and sweeps end everything that a lost message should have ended."""


@dataclass(frozen=True)
class Asked:
    """A request that clients send repeatedly, identified by its number."""

    ids: list[int]
    options: dict[str, Any]


@dataclass
class Told:
    """Outcome of one request.

    Attributes:
        number: Index of the request in ``asked_ones``.
        began_at: When the request was sent, in seconds since 1970.
        gap_s: Longest time between two pieces of its stream.
        gap_at: Start of that longest time.
        refused: Error that the client raised; "" if there was none.
    """

    number: int
    request_id: str
    tokens: list[int]
    began_at: float
    took_s: float = 0.0
    gap_s: float = 0.0
    gap_at: float = 0.0
    refused: str = ""


def asked_ones(seed: int) -> list[Asked]:
    """Return requests that are greedy and sampled by turns."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    draw = random.Random(seed)
    found = []
    for i, ids in enumerate(held_out_prompts(tokenizer, NUM_REQUESTS, 1, MAX_PROMPT, seed)):
        options: dict[str, Any] = {"max_tokens": draw.randint(MIN_TOKENS, MAX_TOKENS)}
        options["ignore_eos"] = True
        if i % 2:
            options |= {"temperature": 0.8, "top_p": 0.9, "seed": draw.getrandbits(60)}
        found.append(Asked(ids, options))
    return found


async def ask(client: AsyncClient, number: int, asked: Asked, name: str) -> Told:
    told = Told(number, name, [], time.time())
    last = began = time.monotonic()
    try:
        async for piece in client.generate(asked.ids, request_id=name, **asked.options):
            now = time.monotonic()
            if told.tokens and now - last > told.gap_s:
                told.gap_s = now - last
                told.gap_at = time.time() - told.gap_s
            last = now
            told.tokens += piece.token_ids
    except InferenceError as error:
        told.refused = str(error)
    told.took_s = time.monotonic() - began
    return told


async def go_on(client: AsyncClient, requests: list[Asked], seed: int, folder: Path) -> None:
    """Send one request after another, with a pause after each that found a gateway full."""
    draw = random.Random(seed)
    for i in itertools.count():
        if (folder / "stop").exists():
            return
        number = draw.randrange(len(requests))
        told = await ask(client, number, requests[number], f"client-{seed}-{i}")
        note(asdict(told), folder)
        if is_turned_away(asdict(told)):
            await asyncio.sleep(FULL_S)  # time: what a gateway asks for


def is_turned_away(told: dict[str, Any]) -> bool:
    """Return whether a request found a gateway full before its first token."""
    return not told["tokens"] and told["refused"].startswith("RESOURCE_EXHAUSTED")


def note(told: dict[str, Any], folder: Path, name: str = "answers.jsonl") -> None:
    file: TextIO
    with (folder / name).open("a") as file:
        file.write(json.dumps(told) + "\n")


async def poison(client: AsyncClient, every_s: float, folder: Path) -> None:
    while not (folder / "calm").exists():
        await asyncio.sleep(every_s)  # time: between two
        told = {"began_at": time.time(), "came": "answered"}
        try:
            await client.complete([*POISON, 9], max_tokens=MIN_TOKENS, ignore_eos=True)
        except InferenceError as error:
            told["came"] = error.code.name
        note(told, folder, "poison.jsonl")


async def look(address: str, folder: Path) -> None:
    """Record the states that the gateways report, whenever they change."""
    before = ""
    async with AsyncClient(address, retry_s=0) as client:
        while True:
            try:
                state = (await client.status()).state
            except InferenceError as error:
                state = error.code.name
            if state != before:
                note({"at": time.time(), "state": state}, folder, "states.jsonl")
            before = state
            await asyncio.sleep(LOOK_S)  # time: between two looks


async def asking(
    address: str, folder: Path, num_clients: int, seed: int, poison_s: float | None
) -> None:
    requests = asked_ones(seed)
    looking = asyncio.create_task(look(address, folder))
    clients = [AsyncClient(address) for _ in range(num_clients)]
    work = [go_on(client, requests, i, folder) for i, client in enumerate(clients)]
    if poison_s is not None:
        work.append(poison(clients[0], poison_s, folder))
    await asyncio.gather(*work)
    looking.cancel()
    status = await clients[0].status()
    is_empty = await nothing_left(clients[0], LEFT_S)
    end = {"nothing_left": is_empty, "state": status.state}
    end["num_ranks"] = len(status.ranks)
    note(end, folder, "end.json")
    for client in clients:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--poison", type=float, metavar="SECONDS")
    args = parser.parse_args()
    asyncio.run(asking(args.address, args.folder, args.clients, args.seed, args.poison))


if __name__ == "__main__":
    main()
