"""Cost of serving: a decode rank's step compared with the bare engine's, and gateway CPU time.

    python -m benchmarks.served [--streams 1,8,32,64] [--tokens 200] [--rounds 3]
        [--plot FILE.png] [--json]

Rank, gateway and client share the machine. The rank computes on one thread without drafts, so that
each step sends one message per stream. Engine, server and bare grpc take turns. The bare grpc
server writes messages of one token to the same number of streams, at the rate of the rank's steps.
The gateway's CPU time per message is compared with that of the bare server.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.decode_step import Case, benches, turn
from benchmarks.harness.held_out import held_out
from benchmarks.harness.procs import cpu_s, serving
from tandem.cluster.client.client import AsyncClient
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto.grpc_settings import proxy_options
from tandem.core.config import TINY_MODEL

ARM = "recorded bf16"
NUM_PROMPT = 64
SETS = "model.dtype=bfloat16", "speculation.max_depth=0", "decode.num_threads=1"
FIGURES = "alone_ms", "step_ms", "cpu_ms", "grpc_ms"
Figures = dict[str, float]


async def read(pieces: AsyncIterator[Any]) -> list[float]:
    """Return the time at which each piece came."""
    return [perf_counter() async for _ in pieces]


async def measured(pid: int, streams: list[AsyncIterator[Any]]) -> Figures:
    """Return the time between pieces, and CPU time of process ``pid`` per piece, both in ms.

    All ``streams`` start now. Only the time in which all are being written counts.
    """
    before_s = cpu_s(pid)
    times = await asyncio.gather(*map(read, streams))
    spent_s = cpu_s(pid) - before_s
    began, ended = max(own[0] for own in times), min(own[-2] for own in times)
    within = sum(began < at <= ended for own in times for at in own)
    if within < len(times):
        raise ValueError("the last answer began when the first had ended; take more --tokens")
    step_s = (ended - began) * len(times) / within
    return {"step_ms": 1e3 * step_s, "cpu_ms": 1e3 * spent_s / sum(map(len, times))}


async def served(pid: int, address: str, num: int, num_tokens: int) -> Figures:
    async with AsyncClient(address) as client:
        prompts = held_out(num, NUM_PROMPT, NUM_PROMPT + 1, seed=num_tokens)
        how: Any = {"max_tokens": num_tokens, "ignore_eos": True}
        return await measured(pid, [client.generate(ids, **how) for ids in prompts])


async def by_grpc(pid: int, address: str, num: int, num_tokens: int, step_ms: float) -> Figures:
    asked = json.dumps([num_tokens + 1, step_ms]).encode()
    async with grpc.aio.insecure_channel(address, proxy_options()) as channel:
        call = channel.unary_stream("/bare/Stream")
        return await measured(pid, [aiter(call(asked)) for _ in range(num)])


async def serve_bare() -> None:
    """Serve messages of one token by grpc alone; all streams get theirs in the same turn of the
    loop."""
    message = pb.GenerateResponse(delta=pb.Delta(token_ids=[1234], text=" word"))
    began = asyncio.get_running_loop().time()

    async def stream(asked: bytes, context: Any) -> None:
        num, step_ms = json.loads(asked)
        for _ in range(num):
            passed_s = asyncio.get_running_loop().time() - began
            await asyncio.sleep(step_ms / 1e3 - passed_s % (step_ms / 1e3))
            await context.write(message.SerializeToString())

    server = grpc.aio.server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextmanager
def bare() -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "benchmarks.served", "--bare"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def measure(streams: list[int], num_tokens: int, num_rounds: int, bar: Progress) -> list[Figures]:
    [bench] = benches(TINY_MODEL, [ARM], 0, 1, max(streams)).values()
    sets = (*SETS, f"decode.max_num_seqs={max(streams)}")
    found: dict[int, list[Figures]] = defaultdict(list)
    with serving(*sets) as server, bare() as (bare_pid, bare_address):
        pid = server.process.pid
        asyncio.run(served(pid, server.address, max(streams), num_tokens))
        for num in bar.track(sorted(streams * num_rounds), description="streams"):
            alone = [step.wall for step in turn(bench, Case(num, 0, "greedy"), 40)]
            ours = asyncio.run(served(pid, server.address, num, num_tokens))
            theirs = by_grpc(bare_pid, bare_address, num, num_tokens, ours["step_ms"])
            told = asyncio.run(theirs)["cpu_ms"]
            figures = statistics.median(alone), ours["step_ms"], ours["cpu_ms"], told
            found[num].append(dict(zip(FIGURES, figures, strict=True)))
    return [
        {
            "streams": num,
            **{name: statistics.median(one[name] for one in found[num]) for name in FIGURES},
        }
        for num in streams
    ]


def show(found: list[Figures]) -> Table:
    table = Table(title="ms; CPU time is a gateway's, of a message")
    for column in ("streams", "step alone", "served", "by alone", "CPU time", "grpc's own"):
        table.add_column(column, justify="right")
    for one in found:
        step = one["alone_ms"], one["step_ms"], one["step_ms"] / one["alone_ms"]
        cpu = f"{one['cpu_ms']:.3f}", f"{one['grpc_ms']:.3f}"
        table.add_row(f"{one['streams']:.0f}", *(f"{figure:.2f}" for figure in step), *cpu)
    return table


def save_plot(path: Path, found: list[Figures]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    num = [one["streams"] for one in found]
    for axes, title, names in (
        (left, "a step, ms", {"alone_ms": "engine alone", "step_ms": "served"}),
        (right, "CPU time of a message, ms", {"cpu_ms": "gateway", "grpc_ms": "grpc alone"}),
    ):
        for name, label in names.items():
            axes.plot(num, [one[name] for one in found], marker="o", label=label)
        axes.set(title=title, xlabel="streams", xscale="log", xticks=num, ylim=(0, None))
        axes.set_xticks(num, [f"{one:.0f}" for one in num])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default="1,8,32,64", metavar="N,N,..")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        return asyncio.run(serve_bare())
    streams = [int(num) for num in args.streams.split(",")]
    with Progress(console=Console(stderr=True)) as bar:
        found = measure(streams, args.tokens, args.rounds, bar)
    if args.plot is not None:
        save_plot(args.plot, found)
    print(json.dumps(found)) if args.json else Console().print(show(found))


if __name__ == "__main__":
    main()
