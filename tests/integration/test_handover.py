"""Whole hand-overs, over gloo between two OS processes and over loopback inside one."""

import asyncio
import hashlib
import itertools
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import pytest
import torch

from core.errors import HandoverError, LayoutMismatch, NodeLost, StalePages
from core.mailbox import EngineLoop
from kv_transfer.base import ChannelMaker
from kv_transfer.caches import Caches
from kv_transfer.channel import ProcessGroupChannels
from kv_transfer.control import Control, InProcessControl
from kv_transfer.layout import PROTOCOL, Group, Layout
from kv_transfer.leases import Key
from kv_transfer.loopback import LoopbackChannels
from kv_transfer.messages import Offer
from kv_transfer.options import TransferOptions
from kv_transfer.pages import PagePool
from kv_transfer.sink import Pulled, Sink
from kv_transfer.source import Source

HOST, EPOCH, DEADLINE_S, WIDTH = "127.0.0.1", "life-1", 3.0, 24
LAYOUT = Layout((Group("main", 3, 4 * WIDTH), Group("mtp", 1, 4 * WIDTH)), "float32", "tiny")
# Small chunks: 3 layers of 96 B make 288 B per token, so a chunk holds 7 tokens.
OPTIONS = TransferOptions(
    lease_s=1.2, staging_bytes=4 * 2048, chunk_bytes=2048, wait_s=0.5, call_timeout_s=3.0,
    progress_timeout_s=4.0,
)  # fmt: skip
BackendHandler = Callable[[str, bytes], Awaitable[bytes]]
_ids = itertools.count()


def values(request_id: str, layer: int, num_tokens: int) -> torch.Tensor:
    """What request's cache holds in a layer (counted over all groups): [num_tokens, WIDTH]."""
    digest = hashlib.sha256(f"{request_id}/{layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(num_tokens, WIDTH, generator=generator)


class Rank:
    """Caches, pages and an engine thread: what both sides have."""

    def __init__(self, name: str, page_size: int, num_pages: int, layout: Layout = LAYOUT) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.tensors = {
            group.name: [torch.zeros(num_pages * page_size, WIDTH) for _ in range(group.num_layers)]
            for group in layout.groups
        }
        self.caches = Caches(layout, self.pool, self.tensors)
        self.engine = EngineLoop(name)
        self.engine.start()

    def layers(self) -> list[torch.Tensor]:
        return [tensor for tensors in self.tensors.values() for tensor in tensors]

    def slots(self, pages: list[int], lo: int, hi: int) -> list[int]:
        size = self.pool.page_size
        return [pages[t // size] * size + t % size for t in range(lo, hi)]


class Prefill(Rank):
    """A prefill engine that computes made-up values, scripted by ``test.*`` control calls."""

    def __init__(self, maker: ChannelMaker) -> None:
        super().__init__("prefill", page_size=5, num_pages=200)
        self.maker = maker
        self.source = Source(
            EPOCH, self.caches, self.engine, maker, self.on_release, OPTIONS
        )  # fmt: skip
        self.pages: dict[Key, list[int]] = {}
        self.released: list[Key] = []
        self.asked: list[str] = []

    def on_release(self, key: Key) -> None:
        assert threading.current_thread().name == "prefill"
        self.pool.release(self.pages.pop(key, []))
        self.released.append(key)

    async def handle(self, method: str, payload: bytes) -> bytes:
        if not method.startswith("test."):
            self.asked.append(method)
            return await self.source.handle(method, payload)
        order = msgpack.unpackb(payload)
        reply = await getattr(self, method.removeprefix("test."))(**order)
        return msgpack.packb(reply)

    async def run(self, request_id: str, attempt: int, num_tokens: int, step: int,
                  delay_s: float, seal: bool) -> None:  # fmt: skip
        """Prefill in chunks of ``step``; the mtp group lags by one token until the end."""
        key = (request_id, attempt)
        await self.engine.call(lambda: self.source.open(key))
        for hi in range(step, num_tokens + step, step):
            await asyncio.sleep(delay_s)
            done = min(hi, num_tokens)
            await self.engine.call(partial(self.compute, key, done, num_tokens))
        if seal:
            hidden = struct.pack("4f", 1, 2, 3, 4)
            await self.engine.call(lambda: self.source.seal(key, 77, hidden, "float32"))

    def compute(self, key: Key, hi: int, num_tokens: int) -> None:
        if key in self.released:
            return
        pages = self.pages.setdefault(key, [])
        pages += self.pool.allocate(self.pool.num_pages_for(hi) - len(pages))
        counts = (hi, hi if hi == num_tokens else hi - 1)
        for layer, cache in enumerate(self.layers()):
            count = counts[0] if layer < 3 else counts[1]
            cache[self.slots(pages, 0, count)] = values(key[0], layer, num_tokens)[:count]
        self.source.advance(key, pages, counts)

    async def fail(self, request_id: str, attempt: int) -> None:
        key = (request_id, attempt)
        await self.engine.call(lambda: self.source.fail(key, "the prompt was refused"))

    async def steal_page(self, request_id: str, attempt: int) -> None:
        """The bug that must never be served: a page changes hands while it is offered."""

        def steal() -> None:
            page = self.pages[request_id, attempt][0]
            self.pool.release([page])
            taken = self.pool.allocate(self.pool.num_free)
            assert page in taken
            self.pool.release([p for p in taken if p != page])

        await self.engine.call(steal)

    async def die(self, in_gather: bool) -> None:
        def end(*_: Any) -> None:
            os._exit(9)

        if in_gather:
            self.caches.gather = end  # type: ignore[method-assign]
        else:
            end()

    async def slow_gather(self, delay_s: float) -> None:
        gather = type(self.caches).gather

        def slow(*args: Any) -> None:
            time.sleep(delay_s)
            gather(self.caches, *args)

        self.caches.gather = slow  # type: ignore[method-assign]

    async def report(self) -> dict[str, Any]:
        self.source.check_integrity()
        await self.engine.call(self.pool.check_integrity)
        used, asked = self.pool.num_used, self.asked
        self.asked = []
        self.caches.__dict__.pop("gather", None)
        return {**self.source.counts(), "pages": used, "released": len(self.released),
                "asked": asked}  # fmt: skip


# --- the control channel of the two-process form: length-framed msgpack over TCP


async def serve(handler: BackendHandler, reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter) -> None:  # fmt: skip
    async def one(call: int, method: str, payload: bytes) -> None:
        data = msgpack.packb([call, await handler(method, payload)])
        writer.write(struct.pack("!I", len(data)) + data)

    tasks = set()
    with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        while True:
            frame = await reader.readexactly(struct.unpack("!I", await reader.readexactly(4))[0])
            tasks.add(task := asyncio.create_task(one(*msgpack.unpackb(frame))))
            task.add_done_callback(tasks.discard)
    writer.close()


class SocketControl:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count()
        self._reading = asyncio.create_task(self._read(reader))

    async def call(self, method: str, payload: bytes) -> bytes:
        if self._reading.done():
            raise NodeLost("the control connection is closed")
        call = next(self._ids)
        self._calls[call] = asyncio.get_running_loop().create_future()
        data = msgpack.packb([call, method, payload])
        self._writer.write(struct.pack("!I", len(data)) + data)
        return await self._calls[call]

    async def close(self) -> None:
        self._writer.close()
        await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = struct.unpack("!I", await reader.readexactly(4))[0]
                call, data = msgpack.unpackb(await reader.readexactly(size))
                waiter = self._calls.pop(call)
                if not waiter.done():
                    waiter.set_result(data)
        except (asyncio.IncompleteReadError, ConnectionError):
            for waiter in self._calls.values():
                if not waiter.done():
                    waiter.set_exception(NodeLost("the control connection broke"))


def prefill_process(pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(_prefill_process(pipe))


async def _prefill_process(pipe: Connection) -> None:
    prefill = Prefill(ProcessGroupChannels("gloo", HOST, DEADLINE_S))
    await prefill.source.start()
    server = await asyncio.start_server(lambda r, w: serve(prefill.handle, r, w), HOST, 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(pipe.recv)
    await prefill.source.stop()
    counts = prefill.source.counts()
    prefill.engine.stop()
    prefill.maker.close()  # type: ignore[attr-defined]
    server.close()
    pipe.send(counts)


class Process:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=prefill_process, args=(theirs,), daemon=True)
        self.process.start()
        self.port = self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send("stop")
        counts = self.pipe.recv()
        self.process.join(10)
        assert not self.process.is_alive() and self.process.exitcode == 0
        assert not any(counts.values()), counts


@pytest.fixture(scope="module")
def gloo_process() -> Iterator[Process]:
    process = Process()
    yield process
    process.stop()


@dataclass
class World:
    """A decode rank, and the prefill rank behind ``control``."""

    decode: Rank
    sink: Sink
    control: Control
    backend: str

    async def tell(self, order: str, **what: Any) -> Any:
        return msgpack.unpackb(await self.control.call(f"test.{order}", msgpack.packb(what)))

    def prefill(self, offer: Offer, step: int = 100, delay_s: float = 0.0,
                seal: bool = True) -> Awaitable[Any]:  # fmt: skip
        return asyncio.create_task(
            self.tell("run", request_id=offer.request_id, attempt=offer.attempt,
                      num_tokens=offer.num_tokens, step=step, delay_s=delay_s, seal=seal)
        )  # fmt: skip

    async def pull(self, offer: Offer) -> tuple[Pulled, list[int]]:
        """Pull into fresh pages; they are freed again if the pull fails."""
        pool = self.decode.pool
        pages = await self.decode.engine.call(
            lambda: pool.allocate(pool.num_pages_for(offer.num_tokens))
        )
        try:
            return await self.sink.pull(offer, self.control, pages), pages
        except BaseException:
            await self.decode.engine.call(lambda: pool.release(pages))
            raise

    async def check_bytes(self, offer: Offer, pages: list[int]) -> None:
        slots = self.decode.slots(pages, 0, offer.num_tokens)
        for layer, cache in enumerate(self.decode.layers()):
            wanted = values(offer.request_id, layer, offer.num_tokens)
            assert torch.equal(cache[slots], wanted), f"layer {layer} differs"
        await self.decode.engine.call(lambda: self.decode.pool.release(pages))

    async def check_clean(self, channels: int | None = None) -> dict[str, Any]:
        """Nothing is held on either side; waits only for what runs in the background."""
        await self.sink.idle()
        counts = self.sink.counts()
        assert (counts["pulls"], counts["staging"], counts["tasks"]) == (0, 0, 0), counts
        self.sink.check_integrity()
        self.decode.pool.check_integrity()
        assert self.decode.pool.num_used == 0
        report: dict[str, Any] = {}
        for _ in range(100):
            report = await self.tell("report")
            held = {k: report[k] for k in ("keys", "leases", "waiting", "staging", "pages")}
            if not any(held.values()) and not report["tasks"]:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"prefill still holds {report}")
        assert channels is None or report["channels"] == channels, report
        return report


def offer(num_tokens: int = 33, **changed: Any) -> Offer:
    fingerprint = LAYOUT.fingerprint()
    made = Offer(PROTOCOL, "p0", EPOCH, f"r{next(_ids)}", 0, fingerprint, num_tokens)
    return replace(made, **changed)


@asynccontextmanager
async def world_over(control: Control, maker: Any, backend: str) -> AsyncIterator[World]:
    decode = Rank("decode", page_size=4, num_pages=100)
    sink = Sink(f"d{next(_ids)}", decode.caches, decode.engine, maker, OPTIONS)
    yield World(decode, sink, control, backend)
    await sink.close()
    assert not any(sink.counts().values()), sink.counts()
    decode.engine.stop()


@pytest.fixture(params=["loopback", "gloo"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "loopback":
        maker = LoopbackChannels(DEADLINE_S)
        prefill = Prefill(maker)
        await prefill.source.start()
        async with world_over(InProcessControl(prefill.handle), maker, "loopback") as world:
            yield world
            await world.check_clean()
        await prefill.source.stop()
        assert not any(prefill.source.counts().values()), prefill.source.counts()
        prefill.engine.stop()
        maker.close()
    else:
        process = request.getfixturevalue("gloo_process")
        async with over_process(process) as world:
            yield world
            await world.check_clean()
    left = [t for t in threading.enumerate() if t.name.startswith(("channel-", "kv-"))]
    for thread in left:
        thread.join(1)
    assert not any(thread.is_alive() for thread in left), left


@asynccontextmanager
async def over_process(process: Process) -> AsyncIterator[World]:
    control = SocketControl(*await asyncio.open_connection(HOST, process.port))
    maker = ProcessGroupChannels("gloo", HOST, DEADLINE_S)
    async with world_over(control, maker, "gloo") as world:
        yield world
    await control.close()


async def test_bytes_are_equal_and_counted(world: World) -> None:
    asked = offer(33)
    running = world.prefill(asked)
    pulled, pages = await world.pull(asked)
    await running
    await world.check_bytes(asked, pages)
    assert pulled.num_bytes == 33 * LAYOUT.bytes_per_token and pulled.backend == world.backend
    assert pulled.num_chunks == 5 + 2 and 0 < pulled.wire_s < pulled.seconds
    assert (pulled.seal.first_token, pulled.seal.hidden_dtype) == (77, "float32")
    assert pulled.seal.hidden is not None and struct.unpack("4f", pulled.seal.hidden)[3] == 4.0
    await world.check_clean(channels=1)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 20, 21])
async def test_lengths_around_page_borders(world: World, num_tokens: int) -> None:
    asked = offer(num_tokens)
    running = world.prefill(asked)
    _, pages = await world.pull(asked)
    await running
    await world.check_bytes(asked, pages)


async def test_a_pull_follows_a_chunked_prefill(world: World) -> None:
    asked = offer(60)
    await world.sink.connect("p0", EPOCH, world.control)
    pulling = asyncio.create_task(world.pull(asked))
    await asyncio.sleep(0.05)
    running = world.prefill(asked, step=10, delay_s=0.1)
    await asyncio.sleep(0.45)
    report = await world.tell("report")
    assert report["asked"].count("send") >= 3, "chunks wait for the end of prefill"
    assert not pulling.done()
    pulled, pages = await pulling
    await running
    await world.check_bytes(asked, pages)
    assert pulled.num_bytes == 60 * LAYOUT.bytes_per_token


async def test_many_pulls_share_one_channel_and_little_staging(world: World) -> None:
    offers = [offer(17 + 3 * i) for i in range(8)]
    running = [world.prefill(asked, step=9, delay_s=0.01) for asked in offers]
    results = await asyncio.gather(*(world.pull(asked) for asked in offers))
    await asyncio.gather(*running)
    for asked, (_, pages) in zip(offers, results, strict=True):
        await world.check_bytes(asked, pages)
    await world.check_clean(channels=1)


async def test_the_lease_lives_while_a_slow_prefill_is_followed(world: World) -> None:
    asked = offer(20)
    running = world.prefill(asked, step=10, delay_s=OPTIONS.lease_s)
    _, pages = await world.pull(asked)
    await running
    await world.check_bytes(asked, pages)
    assert "renew" in (await world.check_clean())["asked"]


async def test_an_unpulled_offer_expires_and_is_refused_after(world: World) -> None:
    before = (await world.tell("report"))["released"]
    asked = offer(20)
    await world.prefill(asked)
    assert (await world.tell("report"))["pages"] == 4
    await asyncio.sleep(OPTIONS.lease_s * 1.5)
    report = await world.check_clean()
    assert report["released"] == before + 1
    with pytest.raises(HandoverError, match="its lease of 1.2 s expired"):
        await world.pull(asked)
    assert (await world.check_clean())["released"] == before + 1, "released once, not twice"


async def test_a_page_that_changed_hands_is_never_served(world: World) -> None:
    asked = offer(20)
    await world.prefill(asked)
    await world.tell("steal_page", request_id=asked.request_id, attempt=0)
    with pytest.raises(StalePages, match="page .*: generation .* noted, .* now"):
        await world.pull(asked)
    await world.check_clean()
    after = offer(9)
    running = world.prefill(after)
    _, pages = await world.pull(after)
    await running
    await world.check_bytes(after, pages)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"epoch": "life-0"}, NodeLost, "epoch 'life-0' was asked for, this is 'life-1'"),
        ({"protocol": 9}, LayoutMismatch, "protocol: 1 here, 9 there"),
        ({"fingerprint": "f00"}, LayoutMismatch, "fingerprint: .* here, f00 offered"),
        ({"attempt": -1}, HandoverError, "attempt -1 was asked for, 0 is open"),
        ({"num_tokens": 21}, HandoverError, "sealed at .20, 20. tokens.* 21 offered"),
        ({"num_tokens": 19}, HandoverError, "20, 20. tokens reported.*19 were offered"),
    ],
)
async def test_an_offer_that_does_not_fit_is_refused_by_name(
    world: World, changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    asked = offer(20)
    await world.prefill(asked)
    with pytest.raises(error, match=text):
        await world.pull(replace(asked, **changed))
    if changed.keys() & {"epoch", "attempt"}:
        _, pages = await world.pull(asked)
        await world.check_bytes(asked, pages)
    await world.check_clean()


async def test_another_layout_is_refused_by_field(world: World) -> None:
    narrow = Layout((LAYOUT.groups[0],), "bfloat16", "tiny")
    rank = Rank("narrow", 4, 10, narrow)
    sink = Sink("narrow", rank.caches, rank.engine, world.sink._maker, OPTIONS)
    with pytest.raises(LayoutMismatch) as caught:
        await sink.connect("p0", EPOCH, world.control)
    assert "dtype: 'float32' here, 'bfloat16' there" in str(caught.value)
    assert "groups: ['main', 'mtp'] here, ['main'] there" in str(caught.value)
    await sink.close()
    assert not any(sink.counts().values())
    rank.engine.stop()


async def test_cancelling_while_waiting_for_prefill_frees_everything(world: World) -> None:
    asked = offer(20)
    pulling = asyncio.create_task(world.pull(asked))
    await asyncio.sleep(0.2)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    await world.sink.idle()
    await world.prefill(asked)
    await world.check_clean()


async def test_cancelling_on_the_wire_keeps_the_channel_and_writes_nothing(world: World) -> None:
    await world.sink.connect("p0", EPOCH, world.control)
    await world.tell("slow_gather", delay_s=0.3)
    asked = offer(40)
    running = world.prefill(asked)
    pulling = asyncio.create_task(world.pull(asked))
    await asyncio.sleep(0.2)
    assert world.sink.counts()["staging"] >= 1, "nothing is on the wire yet"
    pulling.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert time.monotonic() - began < 0.1, "a cancelled pull waits for its transfer"
    await running
    await world.check_clean(channels=1)
    assert not any(cache.any() for cache in world.decode.layers()), "a late scatter"
    assert world.sink._links["p0"].num_connects == 1


async def test_a_failed_prefill_is_told_by_name(world: World) -> None:
    asked = offer(20)
    pulling = asyncio.create_task(world.pull(asked))
    await world.prefill(asked, seal=False)
    await world.tell("fail", request_id=asked.request_id, attempt=0)
    with pytest.raises(HandoverError, match="the prompt was refused"):
        await pulling


async def test_a_pull_without_a_prefill_gives_up(world: World) -> None:
    with pytest.raises(HandoverError, match="nothing new for 4.0 s, .* opened: False"):
        await world.pull(offer(8))


async def test_two_lives_of_one_owner(world: World) -> None:
    """A stale offer after a good one: the good channel is rebuilt afterwards."""
    for epoch, error in ((EPOCH, None), ("life-0", NodeLost), (EPOCH, None)):
        asked = offer(8)
        await world.prefill(asked)
        if error is None:
            _, pages = await world.pull(asked)
            await world.check_bytes(asked, pages)
        else:
            with pytest.raises(error):
                await world.pull(replace(asked, epoch=epoch))
    await asyncio.sleep(OPTIONS.lease_s)
    await world.check_clean(channels=1)


@pytest.mark.parametrize("in_gather", [True, False])
async def test_death_of_prefill_in_a_pull_frees_the_decode_side(in_gather: bool) -> None:
    process = Process()
    async with over_process(process) as world:
        await world.sink.connect("p0", EPOCH, world.control)
        if in_gather:
            await world.tell("die", in_gather=True)
            await world.prefill(offer_ := offer(40))
        else:
            offer_ = offer(40)
        pulling = asyncio.create_task(world.pull(offer_))
        if not in_gather:
            await asyncio.sleep(0.2)
            with pytest.raises(NodeLost):
                await world.tell("die", in_gather=False)
        began = time.monotonic()
        with pytest.raises((NodeLost, HandoverError)):
            await pulling
        assert time.monotonic() - began < DEADLINE_S + 1
        await world.sink.idle()
        counts = world.sink.counts()
        assert (counts["pulls"], counts["staging"], counts["tasks"]) == (0, 0, 0), counts
        world.decode.pool.check_integrity()
        assert world.decode.pool.num_used == 0
    process.process.join(10)
    assert process.process.exitcode == 9
