"""Both ends of a hand-over: the prefill process with its control socket, and a decode rank."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch

from tandem.core.control import Control, Handler, InProcessControl, Service
from tandem.core.identity import Identity
from tandem.kv_transfer.channel import ChannelFactory, create_channel_factory
from tandem.kv_transfer.endpoint import Deadlines, TransferEndpoint
from tandem.kv_transfer.layout import PROTOCOL
from tandem.kv_transfer.messages import Offer
from tandem.kv_transfer.sink import PullResult, Sink
from tandem.net.calls import CALL_ADDRESS, CallClient, CallServer
from tests.forks import forks
from tests.integration.handover_peer import (
    CONFIG,
    DEADLINE_S,
    DEADLINES,
    EPOCH,
    HOST,
    LAYOUT,
    Prefill,
    Rank,
    values,
)
from tests.loopback import LoopbackChannels
from tests.waiting import PATIENCE_S, until

_ids = itertools.count()


def prefill_process(pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(_prefill_process(pipe))


async def _prefill_process(pipe: Connection) -> None:
    prefill = Prefill(create_channel_factory("gloo", HOST, DEADLINE_S))
    server = CallServer(HOST, prefill.handle)
    pipe.send(await server.listen())
    await asyncio.to_thread(pipe.recv)
    await prefill.source.stop()
    counts = prefill.source.counts()
    prefill.engine.stop()
    await server.stop()
    pipe.send(counts)


class Process:
    def __init__(self) -> None:
        context = forks()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=prefill_process, args=(theirs,), daemon=True)
        self.process.start()
        self.address = self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send("stop")
        counts = self.pipe.recv()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive() and self.process.exitcode == 0
        assert not any(counts.values()), counts


@dataclass
class World:
    """A decode rank, and the prefill rank that ``handler`` calls."""

    decode: Rank
    sink: Sink
    handler: Handler
    channel_factory: ChannelFactory

    def control(self, epoch: int = EPOCH) -> Control:
        return InProcessControl(self.handler, epoch)

    async def tell(self, order: str, **what: Any) -> Any:
        return msgpack.unpackb(await self.control().call(f"test.{order}", msgpack.packb(what)))

    def prefill(self, offer: Offer, step: int = 100, delay_s: float = 0.0,
                seal: bool = True) -> Awaitable[Any]:  # fmt: skip
        return asyncio.create_task(
            self.tell("run", request_id=offer.identity.request_id, attempt=offer.identity.attempt,
                      num_tokens=offer.num_tokens, step=step, delay_s=delay_s, seal=seal)
        )  # fmt: skip

    async def pull(self, offer: Offer) -> tuple[PullResult, list[int]]:
        """Pull into fresh pages, which are released if the pull fails."""
        pool = self.decode.pool
        pages = await self.decode.engine.call(
            lambda: pool.allocate(pool.num_pages_for(offer.num_tokens))
        )
        try:
            return await self.sink.pull(offer, self.control(offer.epoch), pages), pages
        except BaseException:
            await self.decode.engine.call(lambda: pool.release(pages))
            raise

    async def check_bytes(self, offer: Offer, pages: list[int]) -> None:
        slots = self.decode.slots(pages, 0, offer.num_tokens)
        for layer, cache in enumerate(self.decode.layers()):
            wanted = values(offer.identity.request_id, layer, offer.num_tokens)
            assert torch.equal(cache[slots], wanted), f"layer {layer} differs"
        await self.decode.engine.call(lambda: self.decode.pool.release(pages))

    async def check_clean(self, channels: int | None = None) -> dict[str, Any]:
        """Check that nothing is held at either end; waits only for background work."""
        await self.sink.idle()
        counts = self.sink.counts()
        assert (counts["pulls"], counts["staging"], counts["tasks"]) == (0, 0, 0), counts
        self.sink._endpoint.staging.check_integrity()
        self.decode.pool.check_integrity()
        assert self.decode.pool.num_free == self.decode.pool.num_pages - 1
        asked: list[str] = []

        async def is_clean() -> bool:
            report.update(await self.tell("report"))
            asked.extend(report["asked"])
            return not any(report[k] for k in ("leases", "waiting", "staging", "pages", "tasks"))

        report: dict[str, Any] = {}
        await until(is_clean)
        report["asked"] = asked
        assert channels is None or report["channels"] == channels, report
        return report


def offer(num_tokens: int = 33, **changed: Any) -> Offer:
    caches = LAYOUT.compatibility_facts()
    made = Offer(PROTOCOL, "p0", "p0", EPOCH, Identity(f"r{next(_ids)}"), caches, num_tokens)
    return replace(made, **changed)


@asynccontextmanager
async def world_over(
    handler: Handler,
    channel_factory: ChannelFactory,
    name: str = "",
    epoch: int = 1,
    deadlines: Deadlines = DEADLINES,
) -> AsyncIterator[World]:
    decode = Rank("decode", page_size=4, num_pages=100)
    endpoint = TransferEndpoint(decode.caches, decode.engine, channel_factory, CONFIG, deadlines)
    sink = Sink(name or f"d{next(_ids)}", epoch, endpoint)
    yield World(decode, sink, handler, channel_factory)
    await sink.close()
    assert not any(sink.counts().values()), sink.counts()
    decode.engine.stop()


@asynccontextmanager
async def over_process(process: Process) -> AsyncIterator[World]:
    door = Service("p0", EPOCH, {CALL_ADDRESS: (None, lambda _: process.address)})
    clients: dict[int, CallClient] = {}

    async def call(epoch: int, method: str, payload: bytes) -> bytes:
        first = InProcessControl(door.handle, EPOCH)
        return await clients.setdefault(epoch, CallClient("p0", epoch, first)).call(method, payload)

    async with world_over(call, create_channel_factory("gloo", HOST, DEADLINE_S)) as world:
        yield world
    for client in clients.values():
        await client.close()


@asynccontextmanager
async def over_loopback() -> AsyncIterator[World]:
    channel_factory = LoopbackChannels(DEADLINE_S)
    prefill = Prefill(channel_factory)
    async with world_over(prefill.handle, channel_factory) as world:
        yield world
    await prefill.source.stop()
    assert not any(prefill.source.counts().values()), prefill.source.counts()
    prefill.engine.stop()
