"""How frames should reach the gateway: Ray's streaming generator against a socket of our own.

    python -m benchmarks.streaming [--num-frames 400] [--period-ms 5] [--rounds 4] [--json]

A Ray actor in a process of its own emits packed TokenFrames from a thread, as an engine does.
Each round sends the same frames over both ways, first at a fixed pace (latency, CPU time),
then as fast as it can (frames per second). Clocks are CLOCK_MONOTONIC, one for all processes.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tandem.core.errors import RankLost
from tandem.core.identity import Identity
from tandem.core.request import SequenceUpdate, TokenFrame
from tandem.core.schema import pack, unpack
from tandem.runtime.frames import Frame, FrameServer, PortAddress, connect

HOST = "127.0.0.1"
WAYS = ("ray", "socket")


def example_frame(num_updates: int) -> TokenFrame:
    """What a full decode step emits: ids as long as ours, one to four tokens each."""
    updates = tuple(
        SequenceUpdate(Identity(f"{i:032x}"), tuple(range(1000, 1001 + i % 4)))
        for i in range(num_updates)
    )
    return TokenFrame(updates)


class Emitter:
    """The Ray actor: emits on a thread, hands frames over on its loop, as a decode node does."""

    def __init__(self, num_updates: int) -> None:
        self._frame = example_frame(num_updates)
        self._readers: set[Callable[[Frame], None]] = set()
        self._server = FrameServer(HOST, self)

    async def listen(self) -> bytes:
        return pack(await self._server.listen())

    async def frames(self) -> AsyncIterator[bytes]:
        """The way over Ray: this method is called with num_returns="streaming"."""
        queue: asyncio.Queue[Frame] = asyncio.Queue()
        unsubscribe = self.subscribe(0, queue.put_nowait)
        try:
            while isinstance(frame := await queue.get(), bytes):
                yield frame
        finally:
            unsubscribe()

    async def emit(self, num_frames: int, period_s: float) -> list[float]:
        """When each frame was emitted; back at once after the last."""
        stamps: list[float] = []
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def run() -> None:
            next_at = time.monotonic()
            for _ in range(num_frames):
                time.sleep(max(0.0, next_at - time.monotonic()))
                next_at += period_s
                stamps.append(time.monotonic())
                loop.call_soon_threadsafe(self._publish)
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=run, name="emit").start()
        await done.wait()
        return stamps

    async def end(self) -> None:
        """End every stream: Ray would keep a generator whose reader has gone."""
        for reader in list(self._readers):
            reader(RuntimeError("the round is over"))

    async def cpu_s(self) -> float:
        return time.process_time()

    def _publish(self) -> None:
        data = pack(self._frame)
        for reader in self._readers:
            reader(data)

    def beat(self, session: int) -> None:
        return

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        self._readers.add(reader)
        return lambda: self._readers.discard(reader)


@dataclass
class Figures:
    """One way's: of paced frames latency and CPU time of both processes, of a burst the rate."""

    latencies_ms: list[float] = field(default_factory=list)
    node_cpu_s: float = 0.0
    gateway_cpu_s: float = 0.0
    rates_hz: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        num, cuts = len(self.latencies_ms), statistics.quantiles(self.latencies_ms, n=100)
        return {
            "p50_ms": cuts[49],
            "p99_ms": cuts[98],
            "mean_ms": statistics.fmean(self.latencies_ms),
            "node_cpu_us": self.node_cpu_s / num * 1e6,
            "gateway_cpu_us": self.gateway_cpu_s / num * 1e6,
            "max_frames_per_s": statistics.median(self.rates_hz),
        }


async def over_ray(actor: Any) -> AsyncIterator[bytes]:
    async for reference in actor.frames.options(num_returns="streaming").remote():
        yield await reference


async def measured(
    actor: Any, frames: AsyncIterator[bytes], num_frames: int, period_s: float
) -> tuple[list[float], list[float], float, float]:
    """Emission and arrival times; CPU seconds of node and gateway. Frames are decoded."""
    node_cpu_s, gateway_cpu_s = await actor.cpu_s.remote(), time.process_time()
    emitting = asyncio.ensure_future(_call(actor.emit, num_frames, period_s))
    arrivals = []
    for _ in range(num_frames):
        data = await anext(frames)
        arrivals.append(time.monotonic())
        unpack(TokenFrame, data)
    gateway_cpu_s = time.process_time() - gateway_cpu_s
    stamps = await emitting
    return stamps, arrivals, await actor.cpu_s.remote() - node_cpu_s, gateway_cpu_s


async def _call(method: Any, *args: Any) -> Any:
    return await method.remote(*args)


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    actor: Any = ray.remote(Emitter).options(max_concurrency=100).remote(args.num_updates)
    address = unpack(PortAddress, await actor.listen.remote())
    figures = {way: Figures() for way in WAYS}
    with Progress(console=Console(stderr=True)) as bar:
        for _ in bar.track(range(args.rounds), description="rounds"):
            for way, found in figures.items():
                if way == "ray":
                    frames = over_ray(actor)
                else:
                    frames = (await connect("emitter", address, 1)).frames()
                await run_round(actor, frames, found, args)
    return {way: found.summary() for way, found in figures.items()}


async def run_round(
    actor: Any, frames: AsyncIterator[bytes], found: Figures, args: argparse.Namespace
) -> None:
    await asyncio.sleep(0.2)
    await measured(actor, frames, 20, args.period_ms / 1e3)
    period_s = args.period_ms / 1e3
    sent, got, node_cpu_s, gateway_cpu_s = await measured(actor, frames, args.num_frames, period_s)
    found.latencies_ms += [(b - a) * 1e3 for a, b in zip(sent, got, strict=True)]
    found.node_cpu_s += node_cpu_s
    found.gateway_cpu_s += gateway_cpu_s
    sent, got, _, _ = await measured(actor, frames, args.num_frames, 0.0)
    found.rates_hz.append(args.num_frames / (got[-1] - sent[0]))
    await actor.end.remote()
    with contextlib.suppress(StopAsyncIteration, RankLost):
        await anext(frames)


def codec_us(num_updates: int) -> float:
    """CPU of packing and unpacking one frame, which both ways pay."""
    frame, num = example_frame(num_updates), 200
    began_s = time.process_time()
    for _ in range(num):
        unpack(TokenFrame, pack(frame))
    return (time.process_time() - began_s) / num * 1e6


def show(result: dict[str, Any]) -> None:
    table = Table("per frame", *WAYS, "ray / socket")
    for name in result["ray"]:
        ray_way, socket_way = (result[way][name] for way in WAYS)
        ratio = ray_way / socket_way if socket_way else float("nan")
        table.add_row(name, f"{ray_way:.2f}", f"{socket_way:.2f}", f"{ratio:.2f}")
    Console().print(table)
    Console().print(f"frames of {result['frame_bytes']} bytes, codec {result['codec_us']:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-frames", type=int, default=400, help="per way and round [400]")
    parser.add_argument("--period-ms", type=float, default=5.0, help="between paced frames [5]")
    parser.add_argument("--num-updates", type=int, default=32, help="sequences per frame [32]")
    parser.add_argument("--rounds", type=int, default=4, help="the ways take turns [4]")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    if min(args.num_frames, args.rounds) < 1 or args.num_frames * args.rounds < 2:
        parser.error("--num-frames and --rounds: latencies of two frames at least are needed")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 << 20,
    )
    try:
        result = asyncio.run(compare(args))
    finally:
        ray.shutdown()
    result["frame_bytes"] = len(pack(example_frame(args.num_updates)))
    result["codec_us"] = codec_us(args.num_updates)
    print(json.dumps(result)) if args.json else show(result)


if __name__ == "__main__":
    main()
