"""Kill ranks repeatedly while clients send requests, and check that every answer is right.

    python -m benchmarks.soak.kills                    # a random rank of 2 + 2 every 8 s
    python -m benchmarks.soak.kills --one --every 3 --num-kills 20

Each client runs one `tandem generate` after another. Every answer is checked against transformers
with the near-tie rule. The command reports the longest time without a usable rank of a kind, and
without any working pair. It also reports how long after the last kill all are back. The exit code
is 1 if a request failed, an answer was wrong, or a rank was missing after --back-s.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import COMMAND, ROOT, actors
from benchmarks.soak.__main__ import show
from benchmarks.soak.load import nothing_left
from tandem import AsyncClient
from tandem.cluster.control.launch import launch
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.core.config import TINY_MODEL, load
from tandem.core.info import DECODE, PREFILL
from training.corpus import held_out_prompts

SETS = (
    *("server.address=127.0.0.1:0", "model.dtype=float32", "speculation.profile_at_startup=false"),
    *("prefill.replicas=2", "decode.replicas=2", "kv.num_pages=300"),
)
NUM_PROMPTS, MAX_PROMPT, NUM_TOKENS = 24, 200, 120
LOOK_S = 0.02
CHAIN_DRAFTERS = {PREFILL: "PrefillActor", DECODE: "DecodeActor"}


@dataclass
class Gaps:
    """Longest times without anything usable: without ranks of each kind, and without pairs."""

    longest_s: dict[str, float] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)

    def note(self, what: str, is_there: bool) -> None:
        now = time.monotonic()
        since = now if is_there else self._since.get(what, now)
        self._since[what] = since
        self.longest_s[what] = max(self.longest_s.get(what, 0.0), now - since)


@dataclass
class Asked:
    """Results of requests: ``answers`` are (prompt, tokens), ``failures`` the output of failed
    commands."""

    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0


async def watch(gateway: ClusterGateway, gaps: Gaps) -> None:
    while True:
        for kind in CHAIN_DRAFTERS:
            gaps.note(kind, any(rank.liveness.is_well for rank in gateway.fleet.of_kind(kind)))
        gaps.note("pair", gateway.is_healthy())
        await asyncio.sleep(LOOK_S)


async def ask(address: str, prompts: list[list[int]], asked: Asked, is_over: asyncio.Event) -> None:
    """Run one command after another."""
    generator = random.Random(len(prompts[0]))
    while not is_over.is_set():
        prompt = generator.choice(prompts)
        args = ("--token-ids", ",".join(map(str, prompt)), "--max-tokens", str(NUM_TOKENS))
        began_at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "generate", *args, "--json", "--address", address),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, told = await process.communicate()
        asked.longest_s = max(asked.longest_s, time.monotonic() - began_at)
        if process.returncode:
            asked.failures.append(told.decode().strip())
        else:
            asked.answers.append((prompt, json.loads(said)["token_ids"]))


class Killer:
    """Sends SIGKILL to ranks of this process's cluster. ``one`` restricts it to decode-0 in all
    epochs."""

    def __init__(self, one: bool, seed: int) -> None:
        self._spared = actors(os.getpid(), CHAIN_DRAFTERS[DECODE])[1:] if one else None
        self._random = random.Random(seed)

    async def kill(self) -> str:
        """Kill a rank as soon as one exists; return its name."""
        while not (found := self._found()):
            await asyncio.sleep(LOOK_S)
        pid, name = self._random.choice(found)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return name

    def _found(self) -> list[tuple[int, str]]:
        if self._spared is not None:
            pids = actors(os.getpid(), CHAIN_DRAFTERS[DECODE])
            return [(pid, "decode-0") for pid in pids if pid not in self._spared]
        classes = CHAIN_DRAFTERS.values()
        return [(pid, name) for name in classes for pid in actors(os.getpid(), name)]


async def back_after(gateway: ClusterGateway, within_s: float) -> float | None:
    """Return the seconds until every pair of ranks works together again; None if they never do."""
    began_at = time.monotonic()
    while time.monotonic() - began_at < within_s:
        if len(gateway.fleet.usable_pairs()) == 4:
            return time.monotonic() - began_at
        await asyncio.sleep(LOOK_S)
    return None


async def kills(args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    prompts = held_out_prompts(tokenizer, NUM_PROMPTS, 1, MAX_PROMPT, args.seed)
    config, asked, gaps = load(None, [*SETS, *args.sets]), Asked(), Gaps()
    is_over = asyncio.Event()
    async with Server(config) as server, launch(config) as gateway:
        await server.attach(gateway)
        watcher = asyncio.create_task(watch(gateway, gaps))
        shares = [prompts[i :: args.clients] for i in range(args.clients)]
        clients = [asyncio.create_task(ask(server.address, s, asked, is_over)) for s in shares]
        killer, killed = Killer(args.one, args.seed), list[str]()
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("killing", total=args.num_kills)
            for i in range(args.num_kills):
                await asyncio.sleep(args.every)
                killed.append(await killer.kill())
                text = f"{i + 1} killed, {len(asked.answers)} answers, {len(asked.failures)} failed"
                bar.update(task, completed=i + 1, description=text)
        back_s = await back_after(gateway, args.back_s)
        await asyncio.sleep(args.every)  # let requests run after recovery
        is_over.set()
        await asyncio.gather(*clients)
        watcher.cancel()
        async with AsyncClient(server.address) as client:
            is_empty, status = await nothing_left(client), await client.status()
        await server.stop()
    wrong, ties = check(asked)
    return {
        "num_killed": len(killed),
        "num_answers": len(asked.answers),
        "num_failed": len(asked.failures),
        "failures": asked.failures[:5],
        "num_wrong": len(wrong),
        "wrong": wrong[:5],
        "near_ties": ties,
        "longest_answer_s": round(asked.longest_s, 1),
        "longest_without_s": {name: round(s, 2) for name, s in gaps.longest_s.items()},
        "full_size_after_s": None if back_s is None else round(back_s, 1),
        "state": status.state,
        "nothing_left": is_empty,
    }


def check(asked: Asked) -> tuple[list[str], list[str]]:
    """Return wrong answers and near ties; equal answers are checked once."""
    wrong, ties = [], []
    for prompt, tokens in {(tuple(p), tuple(t)) for p, t in asked.answers}:
        try:
            ties += near_ties(TINY_MODEL, list(prompt), list(tokens))
        except AssertionError as error:
            wrong.append(str(error))
    return wrong, ties


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--every", type=float, default=8.0, help="seconds between kills [8]")
    add("--num-kills", type=int, default=12, help="number of kills [12]")
    add("--one", action="store_true", help="always the same rank, decode-0")
    add("--clients", type=int, default=3, help="commands at a time [3]")
    add(
        "--back-s",
        type=float,
        default=30.0,
        help="maximum until all ranks are back at the end [30]",
    )
    add("--seed", type=int, default=0, help="seed of the choice of ranks [0]")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    args = parser.parse_args()
    result = asyncio.run(kills(args))
    show(result)
    good = result["full_size_after_s"] is not None and result["nothing_left"]
    if result["num_failed"] or result["num_wrong"] or not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
