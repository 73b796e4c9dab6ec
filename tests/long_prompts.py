"""Measure prompts of 220 kB at a gateway without a cluster, together with other streams.

    python -m tests.long_prompts [--streams 20,60,150] [--seconds 30] [--json FILE]

The gateway is the tests' echo gateway with the tokenizer of the shipped checkpoint, in a separate
process. Clients in a second process send one prompt after another. A refused prompt is sent again
after the pause that the gateway suggests. A third process reads eight other streams, whose pieces
come every 10 ms. Their inter-token latency is shown with and without prompts.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tandem import AsyncClient, InferenceError
from tandem.core.answer import Delta, Finished
from tandem.core.config import TINY_MODEL
from tandem.core.info import ModelInfo
from tandem.core.request import Request
from tandem.text.tokenizer import Tokenizer
from tests.integration.echo_gateway import EOS, EchoGateway, echo_server
from tests.waiting import for_ever

ROOT = Path(__file__).parents[1]
NUM_CHARS = 220_000
MAX_MODEL_LEN = 200_000
PACE_S = 0.01
NUM_OTHERS = 8
OTHER_TOKENS = 40
MAX_TOKENS = 8
DEFAULT_PAUSE_S = 1.0
Figures = dict[str, Any]


class PacedGateway(EchoGateway):
    """An echo gateway that sends a piece every PACE_S, with the tokens of a real tokenizer."""

    model = ModelInfo("echo", "DeepseekV3ForCausalLM", MAX_MODEL_LEN, 2048, (EOS,), 0, False, "")

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = Tokenizer(TINY_MODEL)

    async def generate(
        self, request: Request, aborted: asyncio.Event
    ) -> AsyncGenerator[Delta | Finished, None]:
        self.requests.clear()  # each holds tens of thousands of token ids
        async with aclosing(super().generate(request, aborted)) as pieces:
            async for piece in pieces:
                yield piece
                await asyncio.sleep(PACE_S)  # time: the pace of the answers


async def serve() -> None:
    async with echo_server(PacedGateway(), f"model.max_model_len={MAX_MODEL_LEN}") as server:
        print(server.address, flush=True)
        await for_ever()


def texts(seed: int) -> Iterator[str]:
    """Yield pieces of this repository's source, each of NUM_CHARS, indefinitely."""
    files = sorted(ROOT.glob("c*/**/*.py"))
    source = "".join(path.read_text() for path in files)
    draw = random.Random(seed)
    while True:
        begin = draw.randrange(len(source) - NUM_CHARS)
        yield source[begin : begin + NUM_CHARS]


async def moments_of(client: AsyncClient, text: str, num_tokens: int) -> list[float]:
    """Return the arrival time of each piece of an answer."""
    pieces = client.generate(text, max_tokens=num_tokens)
    return [time.monotonic() async for piece in pieces if piece.token_ids]


async def load(address: str, num_streams: int, seconds: float) -> Figures:
    """Send prompts from ``num_streams`` clients and count the answers within ``seconds``."""
    until = time.monotonic() + seconds
    ttfts_s: list[float] = []
    num_refused = 0

    async def work(client: AsyncClient, seed: int) -> None:
        nonlocal num_refused
        for text in texts(seed):
            sent_at = time.monotonic()
            while True:
                try:
                    moments = await moments_of(client, text, MAX_TOKENS)
                    ttfts_s.append(moments[0] - sent_at)
                    break
                except InferenceError as error:
                    num_refused += 1
                    # time: the pause that a gateway asks for
                    # time: the pause that the gateway asked for
                    await asyncio.sleep(error.retry_after_s or DEFAULT_PAUSE_S)

    async with AsyncClient(address, retry_s=0) as client:
        workers = [asyncio.create_task(work(client, i)) for i in range(num_streams)]
        await asyncio.sleep(until - time.monotonic())  # time: the length of a measurement
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return {
        "requests_per_s": len(ttfts_s) / seconds,
        "num_refused": num_refused,
        **{f"ttft_{name}_s": value for name, value in quantiles(ttfts_s).items()},
    }


async def watch(address: str, seconds: float) -> Figures:
    """Read paced streams for ``seconds`` and return quantiles of the time between two pieces."""
    until = time.monotonic() + seconds
    gaps_s: list[float] = []

    async def work(client: AsyncClient) -> None:
        while time.monotonic() < until:
            moments = await moments_of(client, "def f(x):", OTHER_TOKENS)
            gaps_s.extend(later - earlier for earlier, later in pairwise(moments))

    async with AsyncClient(address, retry_s=0) as client:
        await asyncio.gather(*(work(client) for _ in range(NUM_OTHERS)))
    return {f"itl_{name}_ms": 1e3 * value for name, value in quantiles(gaps_s).items()}


def quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": float("nan"), "p99": float("nan")}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


@contextmanager
def process(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this module in another mode, as a process that ends with the block."""
    command = [sys.executable, "-m", "tests.long_prompts", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def line_of(made: "subprocess.Popen[str]") -> str:
    assert made.stdout is not None
    line = made.stdout.readline().strip()
    assert line, "the process ended without a line"
    return line


def measure(address: str, num_streams: int, seconds: float) -> Figures:
    """Measure the other streams while ``num_streams`` clients send prompts."""
    words = ("--load", address, "--streams", str(num_streams), "--seconds", str(seconds))
    if num_streams == 0:
        return {"streams": 0, **asyncio.run(watch(address, seconds))}
    with process(*words) as loading:
        found = asyncio.run(watch(address, seconds))
        return {"streams": num_streams, **json.loads(line_of(loading)), **found}


def show(found: list[Figures]) -> Table:
    table = Table(title=f"prompts of {NUM_CHARS // 1000} kB")
    columns = {
        "streams": ("streams", "{:d}"),
        "requests_per_s": ("requests/s", "{:.2f}"),
        "ttft_p50_s": ("TTFT p50, s", "{:.2f}"),
        "ttft_p99_s": ("p99", "{:.2f}"),
        "num_refused": ("refused", "{:d}"),
        "itl_p50_ms": ("others' ITL p50, ms", "{:.1f}"),
        "itl_p99_ms": ("p99", "{:.1f}"),
    }
    for title, _ in columns.values():
        table.add_column(title, justify="right")
    for one in found:
        table.add_row(
            *(form.format(one[key]) if key in one else "" for key, (_, form) in columns.items())
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--streams", default="20,60,150", metavar="N,N,..", help="clients that send prompts")
    add("--seconds", type=float, default=30.0, help="of each measurement [30]")
    add("--json", type=Path, metavar="FILE", help="file for the figures")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--load", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
    if args.load:
        print(json.dumps(asyncio.run(load(args.load, int(args.streams), args.seconds))))
        return
    found = []
    with process("--serve") as server, Progress(console=Console(stderr=True)) as bar:
        address = line_of(server)
        numbers = [0, *map(int, args.streams.split(","))]
        for num in bar.track(numbers, description="streams"):
            found.append(measure(address, num, args.seconds))
    Console().print(show(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
