"""Speed of a hand-over compared with gloo alone, between two processes over loopback.

    python -m benchmarks.handover [--rounds 10] [--num-tokens 1500] [--layers 62] [--width 576]

The cache of one prompt is computed once, and is pulled repeatedly like by decode ranks. A pull
requests chunks over the pull connection. They are read into staging, sent by gloo and written into
pages. Two controls take turns with that. In one, gloo sends a tensor of the same size. In the
other, one process copies the same chunks into staging and into pages.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tandem.core.config import KvTransferConfig, load
from tandem.core.control import InProcessControl, Service
from tandem.core.identity import Identity
from tandem.kv_transfer.caches import PagedCaches, Span, split_into_chunks, staging_view
from tandem.kv_transfer.channel import create_channel_factory
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.layout import PROTOCOL
from tandem.kv_transfer.messages import Offer, Seal
from tandem.kv_transfer.pages import PagePool
from tandem.kv_transfer.sink import Sink
from tandem.kv_transfer.source import Source
from tandem.model.kernels.build import build_library
from tandem.model.kernels.native import NativeKernels
from tandem.model.network.cache import MAIN
from tandem.net.calls import CALL_ADDRESS, CallClient, CallServer
from tandem.net.groups import gloo_group, store_client, store_server
from tandem.runtime.engine_loop import EngineLoop

HOST, EPOCH, PAGE_SIZE, TIMEOUT_S = "127.0.0.1", 1, 64, 60.0


@dataclass(frozen=True)
class StepShape:
    """Shape of a prompt's cache: ``num_layers`` by cache group."""

    num_tokens: int
    width: int
    num_layers: dict[str, int]
    device: str = "cpu"
    config: KvTransferConfig = KvTransferConfig()


class Rank:
    """Memory for one prompt, and the thread that owns it."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.pool = PagePool(2 + shape.num_tokens // PAGE_SIZE, PAGE_SIZE)
        self.pages = self.pool.allocate(self.pool.num_free)
        size = self.pool.num_pages, PAGE_SIZE, shape.width
        kind: Any = {"dtype": torch.bfloat16, "device": shape.device}
        memory = {
            name: [torch.randn(size, **kind) for _ in range(num)]
            for name, num in shape.num_layers.items()
        }
        copy = NativeKernels(build_library()).copy_rows if shape.device == "cpu" else None
        self.caches = PagedCaches(memory, self.pool, "bfloat16", "a prompt", copy=copy)
        self.loop = EngineLoop("engine")
        self.loop.start()
        self.endpoint = TransferEndpoint(
            self.caches, self.loop, create_channel_factory("gloo", HOST), shape.config
        )

    @property
    def num_bytes(self) -> int:
        groups = self.caches.layout.groups
        return self.shape.num_tokens * sum(group.bytes_per_token_all_layers for group in groups)


@dataclass
class Seconds:
    """Durations of each round in seconds."""

    sent: list[float] = field(default_factory=list)
    pulled: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


def measured(shape: StepShape, num_rounds: int) -> tuple[int, Seconds]:
    """Return the bytes of the prompt, and the seconds. A first round opens the channel and does not
    count."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=_prefill, args=(theirs, shape), daemon=True)
    child.start()
    theirs.close()  # otherwise this process would not notice that the child has died
    try:
        torch.set_num_threads(1)
        return asyncio.run(_decode(pipe, shape, num_rounds))
    finally:
        pipe.close()
        child.join(TIMEOUT_S)


def _prefill(pipe: Connection, shape: StepShape) -> None:
    torch.set_num_threads(1)
    with pipe:
        asyncio.run(_offer(pipe, Rank(shape)))


async def _offer(pipe: Connection, rank: Rank) -> None:
    """Send the cache by gloo alone, or offer it, as ordered by the peer."""
    source = Source(rank.endpoint)
    server = CallServer(HOST, Service("prefill", EPOCH, source.methods).handle)
    store, port = store_server(HOST, TIMEOUT_S)
    pipe.send((port, await server.listen()))
    joined = lambda: gloo_group(  # noqa: E731
        store_client(HOST, port, TIMEOUT_S, "raw"), 0, 2, HOST, TIMEOUT_S
    )
    group, data = await asyncio.to_thread(joined), torch.ones(rank.num_bytes, dtype=torch.uint8)
    while (order := await asyncio.to_thread(pipe.recv)) != "end":
        if order == "send":
            await asyncio.to_thread(lambda: group.send([data], 1, 0).wait())
            continue
        await rank.loop.call(lambda: source.open(order, lambda: None))  # noqa: B023
        told = order, rank.pages, rank.shape.num_tokens, Seal(7)
        await rank.loop.call(lambda: source.advance(*told))  # noqa: B023
        pipe.send("offered")
    await source.stop()
    await server.stop()
    await asyncio.to_thread(rank.loop.stop)
    del store


async def _decode(pipe: Connection, shape: StepShape, num_rounds: int) -> tuple[int, Seconds]:
    rank, (port, address) = Rank(shape), await asyncio.to_thread(pipe.recv)
    group = gloo_group(store_client(HOST, port, TIMEOUT_S, "raw"), 1, 2, HOST, TIMEOUT_S)
    target = torch.empty(rank.num_bytes, dtype=torch.uint8)
    door = Service("prefill", EPOCH, {CALL_ADDRESS: (None, lambda _: address)})
    control = CallClient("prefill", EPOCH, InProcessControl(door.handle, EPOCH))
    sink, seconds = Sink("decode", EPOCH, rank.endpoint), Seconds()

    async def send() -> None:
        pipe.send("send")
        await asyncio.to_thread(lambda: group.recv([target], 0, 0).wait())

    async def pull(identity: Identity) -> None:
        facts = rank.caches.layout.compatibility_facts()
        given = PROTOCOL, "prefill", "prefill", EPOCH, identity, facts, shape.num_tokens
        await sink.pull(Offer(*given), control, rank.pages)

    for i in track(range(num_rounds + 1), "rounds"):
        identity = Identity(f"r{i}")
        pipe.send(identity)
        assert await asyncio.to_thread(pipe.recv) == "offered"
        await _timed(seconds.pulled, lambda: pull(identity))  # noqa: B023
        await _timed(seconds.sent, send)
        for times, copy in ((seconds.read, _read), (seconds.written, _write)):
            await _timed(times, lambda: asyncio.to_thread(copy, rank))  # noqa: B023
    await sink.close()
    pipe.send("end")
    await asyncio.to_thread(rank.loop.stop)
    return rank.num_bytes, seconds


async def _timed(times: list[float], work: Callable[[], Awaitable[None]]) -> None:
    began_at = time.perf_counter()
    await work()
    times.append(time.perf_counter() - began_at)


def _spans(rank: Rank) -> list[Span]:
    spans = (
        Span(group, rank.pages, 0, rank.shape.num_tokens) for group in rank.caches.layout.groups
    )
    return [
        part for span in spans for part in split_into_chunks(span, rank.endpoint.config.chunk_bytes)
    ]


def _read(rank: Rank) -> None:
    buffer = rank.endpoint.staging._free[-1]
    for span in _spans(rank):
        rank.caches.gather(span, staging_view(span, buffer))


def _write(rank: Rank) -> None:
    buffer = rank.endpoint.staging._free[-1]
    for span in _spans(rank):
        rank.caches.scatter(span, staging_view(span, buffer))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds [10]")
    parser.add_argument("--num-tokens", type=int, default=1500, help="tokens of the prompt [1500]")
    parser.add_argument("--layers", type=int, default=62, help="layers [62, DeepSeek-V3 with MTP]")
    parser.add_argument("--width", type=int, default=576, help="values per token and layer [576]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="config key"
    )
    asked = parser.parse_args()
    config = load(None, asked.set).kv_transfer
    shape = StepShape(asked.num_tokens, asked.width, {MAIN: asked.layers}, config=config)
    num_bytes, seconds = measured(shape, asked.rounds)
    table = Table(title=f"{num_bytes / 1e6:.0f} MB, medians of {asked.rounds}")
    for name in ("", "ms", "GB/s", "of gloo alone"):
        table.add_column(name, justify="right" if name else "left")
    alone_s = statistics.median(seconds.sent[1:])
    names = {"sent": "one send of gloo's", "pulled": "a prompt pulled"}
    names |= {"read": "read alone", "written": "written alone"}
    for name, what in names.items():
        median_s = statistics.median(getattr(seconds, name)[1:])
        rate = f"{num_bytes / median_s / 1e9:.2f}"
        table.add_row(what, f"{median_s * 1e3:.1f}", rate, f"{alone_s / median_s:.2f}")
    ratios = [sent / pulled for sent, pulled in zip(seconds.sent, seconds.pulled, strict=True)]
    Console().print(table)
    Console().print(f"pairs: {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios[1:]))}")


if __name__ == "__main__":
    main()
