"""Load a cluster with all shapes of requests, end many early, and check every answer.

    python -m benchmarks.soak --num-requests 1000 --cancel 0 --deadline 0
    python -m benchmarks.soak --minutes 10 --set kv.num_pages=90   # all ends, preemption

Prompts have 1 to 1,500 held-out tokens, with 0 to 3 drafts and n up to 3. Requests are greedy or
sampled, with penalties, bias, min_tokens, min_p, log probabilities and stop strings. Some are ended
at a random moment by dropping the call, by Abort or by a deadline, so that every phase is hit.

Then every answer is checked, or the part of it that arrived. Plain greedy answers are compared with
transformers. All others are compared with the same request run alone without drafts. A differing
token passes only as a near tie: the float64 top two are closer than 1e-4. At most 2 in 1,000
answers may have one.

The exit code is 1 if anything was wrong, failed, hung, or was left behind. Waiting in the queue
counts as no progress: for a small pool use fewer requests in flight, or raise --hang-s.
"""

import argparse
import asyncio
import functools
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.soak.check import Checked, Checker
from benchmarks.soak.freed import Freed
from benchmarks.soak.load import Load, Tally, nothing_left, run_alone
from benchmarks.soak.plans import Shares, plans
from tandem import AsyncClient
from tandem.cluster.control.launch import launch
from tandem.cluster.entrypoints.server import Server
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.core.config import TandemConfig, load
from tandem.core.info import ServerStatus

MAX_TIES = 2 / 1000
MAX_SHOWN = 5


@asynccontextmanager
async def serving(config: TandemConfig) -> AsyncIterator[tuple[ClusterGateway, AsyncClient]]:
    """Start a local cluster. The client never retries, so that every error is seen."""
    async with Server(config) as server, launch(config) as gateway:
        await server.attach(gateway)
        async with AsyncClient(server.address, retry_s=0) as client:
            yield gateway, client
        await server.stop()


async def load_phase(client: AsyncClient, freed: Freed, args: argparse.Namespace) -> Tally:
    """Run the load. The bar counts requests, or seconds if a time was given."""
    shares = Shares(cancel=args.cancel, deadline=args.deadline)
    num_requests = None if args.minutes else args.num_requests
    asked = plans(args.seed, num_requests, args.max_prompt, args.max_tokens, shares)
    began_at = time.monotonic()
    until = began_at + args.minutes * 60 if args.minutes else math.inf
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=args.minutes * 60 or args.num_requests)

        def on_end(tally: Tally) -> None:
            done = time.monotonic() - began_at if args.minutes else tally.ends.total()
            text = f"load: {tally.ends.total()} ended, {len(tally.errors)} errors"
            bar.update(task, completed=done, description=text)

        load = Load(client, freed, on_end, args.hang_s)
        return await load.run(asked, args.in_flight, until)


async def check_phase(client: AsyncClient, tally: Tally, share: float) -> Checked:
    """Check the answers, or an evenly spread share of them, one after another."""
    eos_ids = (await client.model_info()).eos_token_ids
    checker = Checker(functools.partial(run_alone, client), eos_ids)
    num = math.ceil(len(tally.answers) * share)
    chosen = [tally.answers[i * len(tally.answers) // num] for i in range(num)]
    with Progress(console=Console(stderr=True)) as bar:
        for answer in bar.track(chosen, description="checking"):
            await checker.check(answer)
    return checker.found


def num_preempted(status: ServerStatus) -> int:
    return int(sum(rank.counters.get("num_preempted", 0) for rank in status.ranks))


def mean_step_ms(status: ServerStatus) -> float:
    """Return the mean step time of the decode nodes in ms."""
    counters = [rank.counters for rank in status.ranks if "step_s" in rank.counters]
    num_steps = sum(one["num_steps"] for one in counters)
    return sum(one["step_s"] for one in counters) / max(1, num_steps) * 1e3


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    sets = ["server.address=127.0.0.1:0", "server.max_queued=2000", *args.sets]
    async with serving(load(None, ["model.dtype=float32", *sets])) as (gateway, client):
        freed = Freed(list(gateway.fleet.ranks.values()))
        began_at = time.monotonic()
        tally = await load_phase(client, freed, args)
        load_s = time.monotonic() - began_at
        is_empty = await nothing_left(client)
        status = await client.status()
        checked = await check_phase(client, tally, args.check)
        return {
            "num_requests": tally.ends.total(),
            "ends": dict(sorted(tally.ends.items())),
            "num_errors": len(tally.errors),
            "errors": tally.errors[:MAX_SHOWN],
            "num_aborts_missed": tally.num_aborts_missed,
            "num_tokens": tally.num_tokens,
            "load_s": round(load_s, 1),
            "num_preempted": num_preempted(status),
            "mean_decode_step_ms": round(mean_step_ms(status), 1),
            "freed_after_cancel": await freed.summary(),
            "nothing_left": is_empty and await nothing_left(client),
            "num_checked": checked.num,
            "num_wrong": len(checked.wrong),
            "wrong": checked.wrong[:MAX_SHOWN],
            "near_ties": checked.ties,
        }


def passed(result: dict[str, Any]) -> bool:
    good = not result["num_errors"] and not result["num_wrong"] and result["nothing_left"]
    return good and len(result["near_ties"]) <= math.ceil(MAX_TIES * result["num_checked"])


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: give 0 to 1")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few: give at least 1")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num-requests", type=positive, default=1000, help="number of requests [1000]")
    add("--minutes", type=float, default=0.0, help="duration, instead of --num-requests")
    add("--in-flight", type=positive, default=64, help="requests at a time [64]")
    add("--cancel", type=share, default=Shares().cancel, help="share dropped or aborted [0.15]")
    add("--deadline", type=share, default=Shares().deadline, help="share with a deadline [0.1]")
    add("--check", type=share, default=1.0, help="share of the answers that is checked [1]")
    add("--max-prompt", type=positive, default=1500, help="tokens of the longest prompt [1500]")
    add("--max-tokens", type=positive, default=64, help="tokens of the longest answer [64]")
    add(
        "--hang-s",
        type=float,
        default=60.0,
        help="seconds without progress of a stream, in the queue too, that are a hang [60]",
    )
    add("--seed", type=int, default=0, help="seed of the requests [0]")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    add("--json", action="store_true", help="print one JSON line")
    return parser.parse_args()


def show(result: dict[str, Any]) -> None:
    """Print one line per figure, and per item of those that have several."""
    for name, value in result.items():
        lines: list[Any] = [value]
        if isinstance(value, dict):
            lines = [f"{inner}: {item}" for inner, item in value.items()]
        elif isinstance(value, list):
            lines = value or ["none"]
        for i, line in enumerate(lines):
            print(f"{'' if i else name:>20}  {line}")


def main() -> None:
    args = arguments()
    result = asyncio.run(soak(args))
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    if not passed(result):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
