"""Hand-overs between two processes on one device, over gloo and pinned memory, beside what gloo
alone sends: two ranks of NCCL want a GPU each."""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.say import Say
from benchmarks.gpu.shapes import SHAPES
from core.config import KvTransferConfig
from core.control import InProcessControl, Service
from core.identity import Identity
from kv_transfer.caches import PagedCaches
from kv_transfer.channel import make_channels
from kv_transfer.layout import PROTOCOL
from kv_transfer.messages import Offer, Seal
from kv_transfer.pages import PagePool
from kv_transfer.side import Side
from kv_transfer.sink import Sink
from kv_transfer.source import Source
from model.checkpoint.config import ModelConfig
from model.network.cache import MAIN, MTP
from runtime.engine_loop import EngineLoop
from wires.calls import DOOR, CallClient, CallServer
from wires.groups import gloo_group, store_client, store_server

HOST, EPOCH, PAGE_SIZE, TIMEOUT_S = "127.0.0.1", 1, 64, 60.0
NUM_TIMES = 4
"""The first one opens the channel and does not count."""


class Rank:
    """Memory for one prompt, and the thread it belongs to."""

    def __init__(self, device: Device) -> None:
        name, self.num_tokens = ("small", 100) if device.is_rehearsal else ("v2-lite", 16384)
        config = ModelConfig.from_dict(SHAPES[name])
        self.pool = PagePool(2 + self.num_tokens // PAGE_SIZE, PAGE_SIZE)
        self.pages = self.pool.allocate(self.pool.num_free)
        shape = self.pool.num_pages, PAGE_SIZE, config.latent_dim
        kind: Any = {"dtype": torch.bfloat16, "device": device.kind}
        layers = {MAIN: config.num_hidden_layers, MTP: 1}
        memory = {
            name: [torch.randn(shape, **kind) for _ in range(num)] for name, num in layers.items()
        }
        self.caches = PagedCaches(memory, self.pool, "bfloat16", name)
        self.loop = EngineLoop("engine")
        self.loop.start()
        self.side = Side(self.caches, self.loop, make_channels("gloo", HOST), KvTransferConfig())

    @property
    def num_bytes(self) -> int:
        per_token = (group.bytes_per_token_all_layers for group in self.caches.layout.groups)
        return self.num_tokens * sum(per_token)


def run(device: Device, say: Say) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=_prefill, args=(theirs, device), daemon=True)
    child.start()
    try:
        raw = _raw(pipe)
        pulled = asyncio.run(_decode(pipe, device))
    finally:
        pipe.close()
        child.join(TIMEOUT_S)
    say("gloo alone", bytes_per_s=raw)
    say("a prompt pulled", bytes_per_s=pulled, of_raw=pulled / raw)


def _prefill(pipe: Connection, device: Device) -> None:
    with pipe:
        rank = Rank(device)
        store, port = store_server(HOST, TIMEOUT_S)
        pipe.send((port, rank.num_bytes, rank.side.config.chunk_bytes))
        group = gloo_group(store_client(HOST, port, TIMEOUT_S, "raw"), 0, 2, HOST, TIMEOUT_S)
        for part in _parts(rank.num_bytes, rank.side.config.chunk_bytes) * NUM_TIMES:
            group.send([part], 1, 0).wait()
        asyncio.run(_offer(pipe, rank))
        rank.loop.stop()


def _parts(num_bytes: int, chunk_bytes: int) -> list[torch.Tensor]:
    part = torch.ones(min(chunk_bytes, num_bytes), dtype=torch.uint8)
    return [part] * -(-num_bytes // chunk_bytes)


def _raw(pipe: Connection) -> float:
    port, num_bytes, chunk_bytes = pipe.recv()
    group = gloo_group(store_client(HOST, port, TIMEOUT_S, "raw"), 1, 2, HOST, TIMEOUT_S)
    parts = _parts(num_bytes, chunk_bytes)

    def receive() -> None:
        for part in parts:
            group.recv([part], 0, 0).wait()

    return sum(part.nbytes for part in parts) / _median_s([receive] * NUM_TIMES)


def _median_s(works: list[Callable[[], object]]) -> float:
    times = []
    for work in works:
        began_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_at)
    return statistics.median(times[1:])


async def _offer(pipe: Connection, rank: Rank) -> None:
    """The same prompt, computed long ago, as often as it is asked for."""
    source = Source(rank.side)
    service = Service("prefill", EPOCH, source.methods)
    server = CallServer(HOST, service.handle)
    identities = [Identity(f"r{i}", attempt=i) for i in range(NUM_TIMES)]
    for identity in identities:
        await rank.loop.call(lambda: source.open(identity, lambda: None))  # noqa: B023
        told = identity, rank.pages, rank.num_tokens, Seal(7)
        await rank.loop.call(lambda: source.advance(*told))  # noqa: B023
    pipe.send(await server.listen())
    await asyncio.to_thread(pipe.recv)
    await source.stop()
    await server.stop()


async def _decode(pipe: Connection, device: Device) -> float:
    rank, address, times = Rank(device), await asyncio.to_thread(pipe.recv), list[float]()
    door = Service("prefill", EPOCH, {DOOR: (None, lambda _: address)})
    control = CallClient("prefill", EPOCH, InProcessControl(door.handle, EPOCH))
    sink, caches = Sink("decode", EPOCH, rank.side), rank.caches.layout.facts()
    for i in range(NUM_TIMES):
        identity = Identity(f"r{i}", attempt=i)
        offer = Offer(PROTOCOL, "prefill", "prefill", EPOCH, identity, caches, rank.num_tokens)
        began_at = time.perf_counter()
        await sink.pull(offer, control, rank.pages)
        times.append(time.perf_counter() - began_at)
    await sink.close()
    pipe.send("done")
    await asyncio.to_thread(rank.loop.stop)
    return rank.num_bytes / statistics.median(times[1:])
