"""Memory of a decode rank under thousands of mixed requests.

    python -m benchmarks.soak.memory                        # 5,000 requests, 48 at once
    python -m benchmarks.soak.memory --num-requests 1000

Texts have 8 to 400 held-out tokens, answers 1 to 160. Requests are greedy or sampled, with rules,
log probabilities, stop strings and n up to 3. These need many different programs.

The exit code is 1 in any of these cases:

- A request failed.
- The rank grew by more than its pages plus 100 MB.
- The rank continued to grow after half of the requests.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks.harness.procs import actors, rss_mb
from benchmarks.soak.__main__ import positive, serving
from benchmarks.soak.freed import Freed
from benchmarks.soak.load import Load, Tally, nothing_left
from benchmarks.soak.plans import Plan, Shares, plans
from tandem.core.config import load
from tandem.core.info import DECODE
from tandem.core.membership import RankInfo
from tandem.model.checkpoint.config import ModelConfig

LEAST_PROMPT, MOST_PROMPT, MOST_TOKENS = 8, 400, 160
MOST_GROWN_MB = 100
MOST_LATE_MB = 16
"""Maximum growth in MB after half of the requests that does not count."""
NUM_SAMPLES = 100


@dataclass
class Memory:
    """Memory of one process, as counted by the kernel."""

    pid: int
    samples_mb: list[float] = field(default_factory=list)

    def sample(self) -> float:
        self.samples_mb.append(rss_mb(self.pid))
        return self.samples_mb[-1]

    @property
    def grown_mb(self) -> float:
        return max(self.samples_mb) - self.samples_mb[0]

    @property
    def grown_late_mb(self) -> float:
        """Median of the last quarter of the samples less the median of the third quarter."""
        half, quarter = len(self.samples_mb) // 2, max(1, len(self.samples_mb) // 4)
        return median(self.samples_mb[-quarter:]) - median(self.samples_mb[half : half + quarter])


def pages_mb(path: Path, info: RankInfo) -> float:
    """Return the size of all pages of a rank, which take memory once they are used."""
    config = ModelConfig.from_dir(path)
    num_layers = config.num_hidden_layers + config.num_nextn_predict_layers
    num_bytes = {"float32": 4, "bfloat16": 2}[info.model.dtype]
    return info.max_tokens * num_layers * config.latent_dim * num_bytes / 2**20


def asked(seed: int, num: int) -> Iterator[Plan]:
    shares = Shares(cancel=0.0, deadline=0.0)
    endless = plans(seed, None, MOST_PROMPT, MOST_TOKENS, shares)
    return islice((plan for plan in endless if len(plan.ids) >= LEAST_PROMPT), num)


async def soak(args: argparse.Namespace) -> bool:
    config = load(None, ["server.address=127.0.0.1:0", "server.max_queued=2000", *args.sets])
    async with serving(config) as (gateway, client):
        [info] = [handle.info for handle in gateway.fleet.of_kind(DECODE)]
        pages = pages_mb(config.model.path, info)
        [pid] = actors(os.getpid(), "DecodeActor")
        memory = Memory(pid)
        began = memory.sample()
        print(f"at the start {began:.0f} MB; all pages are {pages:.0f} MB")
        every = max(1, args.num_requests // NUM_SAMPLES)
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("load", total=args.num_requests)

            def on_end(tally: Tally) -> None:
                num = tally.ends.total()
                if num % every == 0:
                    now = memory.sample()
                    text = f"{now:.0f} MB, {len(tally.errors)} errors"
                    bar.update(task, completed=num, description=text)
                if num % (10 * every) == 0:
                    print(f"{num:6} requests {memory.samples_mb[-1]:6.0f} MB", flush=True)

            made = Load(client, Freed([*gateway.fleet.ranks.values()]), on_end, args.hang_s)
            tally = await made.run(
                asked(args.seed, args.num_requests), args.in_flight, float("inf")
            )
        is_empty = await nothing_left(client)
    print(f"grown by {memory.grown_mb:.0f} MB (at most {pages + MOST_GROWN_MB:.0f}),")
    print(f"of these {memory.grown_late_mb:.0f} MB in the second half (at most {MOST_LATE_MB});")
    print(f"{tally.num_tokens} tokens, {len(tally.errors)} errors {tally.errors[:3]}")
    is_bounded = memory.grown_mb <= pages + MOST_GROWN_MB and memory.grown_late_mb <= MOST_LATE_MB
    return is_bounded and not tally.errors and is_empty


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num-requests", type=positive, default=5000, help="number of requests [5000]")
    add("--in-flight", type=positive, default=48, help="requests at a time [48]")
    add(
        "--hang-s", type=float, default=120.0, help="seconds without progress that are a hang [120]"
    )
    add("--seed", type=int, default=0, help="seed of the requests [0]")
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="config key")
    if not asyncio.run(soak(parser.parse_args())):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
