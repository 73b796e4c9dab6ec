"""Idle streams and unread answers never lock out other clients."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from benchmarks.harness.procs import serving
from benchmarks.soak.load import nothing_left
from tandem import AsyncClient
from tandem.cluster.entrypoints import calls, grpc_server
from tandem.cluster.entrypoints.grpc_server import SERVICE
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto import tandem_pb2_grpc as rpc
from tests.integration.echo_gateway import EchoGateway, echo_server
from tests.integration.test_hostile_clients import Flood, asked, is_serving, refusal_of
from tests.waiting import PATIENCE_S, until

NUM, AT_ONCE = 1600, 400
"""Total number of streams, and the number opened at once. Of more at once, grpc would drop some."""
OF_ITS_OWN = ("grpc.use_local_subchannel_pool", 1)
"""Option for a connection that no other channel of this process shares."""
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
"""Options of a client whose window holds one piece of the flood. The server sends the next piece
only after the client has read."""
NARROWEST = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 5))
"""Options of a client whose window does not even hold a health message."""
WATCH = f"/{health.SERVICE_NAME}/Watch"
REFLECTIONS = (
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
    f"/{reflection.SERVICE_NAME.replace('v1alpha', 'v1')}/ServerReflectionInfo",
)


@asynccontextmanager
async def connected(address: str, *options: tuple[str, int]) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, (OF_ITS_OWN, *options)) as channel:
        yield channel


def idle_stream(channel: grpc.aio.Channel, method: str, asked: bytes = b"") -> grpc.aio.Call:
    """Open a stream that is never read. A reflection stream sends no request either."""
    if method == WATCH:
        return channel.unary_stream(method)(asked)
    return channel.stream_stream(method)()


async def codes(streams: list[grpc.aio.Call]) -> set[str]:
    """Return the status names of the streams that have ended."""
    return {(await stream.code()).name for stream in streams if stream.done()}


async def check_others(address: str) -> None:
    """Check that health is reported and that an answer starts."""
    began = time.monotonic()
    assert await is_serving(address)
    print(f"health check: {time.monotonic() - began:.3f} s")
    async with connected(address) as channel:
        stub = rpc.InferenceStub(channel)
        async with asyncio.timeout(PATIENCE_S):
            assert (await stub.GetStatus(pb.GetStatusRequest())).state == pb.Status.SERVING
            call = stub.Generate(asked("abc"))
            assert (await call.read()).delta.token_ids
            call.cancel()


@pytest.mark.parametrize("method", [WATCH, *REFLECTIONS], ids=["watch", "v1alpha", "v1"])
async def test_idle_streams_of_one_connection_are_few(method: str) -> None:
    async with echo_server(EchoGateway()) as server, connected(server.address) as channel:
        streams: list[grpc.aio.Call] = []
        most = calls.MAX_IDLE_PER_CONNECTION if method != REFLECTIONS[1] else 0
        for _ in range(NUM // AT_ONCE):
            streams.extend(idle_stream(channel, method) for _ in range(AT_ONCE))
            await until(lambda: sum(stream.done() for stream in streams) == len(streams) - most)
        assert await codes(streams) == {"RESOURCE_EXHAUSTED" if most else "UNIMPLEMENTED"}
        await check_others(server.address)
        for stream in streams:
            stream.cancel()


async def test_idle_streams_of_all_connections_are_bounded_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each ended stream frees its slot, no matter which end closed it."""
    monkeypatch.setattr(calls, "MAX_IDLE_STREAMS", 3)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(echo_server(EchoGateway()))
        channels = [await stack.enter_async_context(connected(server.address)) for _ in range(4)]
        watches = [idle_stream(channel, WATCH) for channel in channels]
        await until(lambda: any(watch.done() for watch in watches))
        [refused] = [i for i, watch in enumerate(watches) if watch.done()]
        assert await codes(watches) == {"RESOURCE_EXHAUSTED"}
        await check_others(server.address)
        monkeypatch.setattr(calls, "MAX_IDLE_STREAM_S", 0.2)
        watches.pop(refused)
        watches.pop().cancel()
        ended = {"RESOURCE_EXHAUSTED"}
        async with asyncio.timeout(PATIENCE_S):
            while ended == {"RESOURCE_EXHAUSTED"}:  # the server has not received the cancellation
                short = idle_stream(channels[refused], REFLECTIONS[0])
                await until(short.done)
                ended = await codes([short])
        assert ended == {"UNAVAILABLE"}
        assert not any(watch.done() for watch in watches), "their time is not over"
        again = channels[refused].unary_stream(WATCH)(b"")
        assert await again.read() == b"\x08\x01"
        for watch in (*watches, again):
            watch.cancel()


async def test_what_a_watcher_leaves_unread_holds_up_no_change_of_health_and_no_drain() -> None:
    gateway, service = EchoGateway(), health_pb2.HealthCheckRequest(service=SERVICE)
    asked_for = service.SerializeToString()
    async with (
        echo_server(gateway) as server,
        connected(server.address, *NARROWEST) as narrow,
        connected(server.address) as other,
    ):
        unread = idle_stream(narrow, WATCH, asked_for)
        watched = other.unary_stream(WATCH)(asked_for)
        assert await watched.read() == b"\x08\x01"
        gateway.is_healthy = lambda: False  # type: ignore[method-assign]
        async with asyncio.timeout(PATIENCE_S):
            assert await watched.read() == b"\x08\x02"
        assert not await is_serving(server.address)
        async with asyncio.timeout(PATIENCE_S):
            await server.drain()
        for watch in (unread, watched):
            watch.cancel()


async def test_answers_that_nobody_reads_shut_nobody_out() -> None:
    """The number of answers exceeds every former bound on calls. All are ended and none is read."""
    flood = Flood()
    flood.max_streams = 2 * NUM
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(echo_server(flood, "server.write_timeout_s=0.5"))
        unread: list[grpc.aio.Call] = []
        for _ in range(NUM // AT_ONCE):
            channel = await stack.enter_async_context(connected(server.address, *NARROW))
            stub = rpc.InferenceStub(channel)
            unread.extend(stub.Generate(asked("abc")) for _ in range(AT_ONCE))
            await until(lambda: len(flood.requests) == len(unread))
        await until(lambda: flood.num_closed == NUM)
        assert not any(call.done() for call in unread), "their clients have not heard of it"
        await check_others(server.address)
        for call in unread[1:]:
            call.cancel()
        assert (await refusal_of(unread[0])).code() == grpc.StatusCode.UNAVAILABLE


async def test_streams_of_one_connection_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread messages are bounded too: the client's next call waits until the client has read."""
    monkeypatch.setattr(grpc_server, "SPARE_CALLS", 4)
    flood, sets = (
        Flood(),
        ("server.write_timeout_s=0.3", "decode.max_num_seqs=1", "server.max_queued=2"),
    )
    async with (
        echo_server(flood, *sets) as server,
        connected(server.address, *NARROW) as channel,
    ):
        stub = rpc.InferenceStub(channel)
        unread = [stub.Generate(asked("abc")) for _ in range(9)]
        await until(lambda: flood.num_closed == 8)
        await check_others(server.address)
        assert not any(call.done() for call in unread)
        assert len(flood.requests) == 8 + 1, "one of the ninth's and one of others"


@pytest.mark.slow
async def test_a_whole_cluster_answers_1600_requests_that_nobody_reads() -> None:
    """Rows and stream slots are freed each time, other clients are served, and memory stays low."""
    async with AsyncExitStack() as stack:
        sets = ("server.write_timeout_s=0.5", "kv.num_pages=600")
        server = stack.enter_context(serving(*sets))
        client = await stack.enter_async_context(AsyncClient(server.address))
        await check_others(server.address)
        before, unread = memory_bytes(server.process.pid), list[grpc.aio.Call]()
        probing = asyncio.create_task(longest_check(server.address, lambda: len(unread) >= NUM))
        while len(unread) < NUM:
            channel = await stack.enter_async_context(connected(server.address, *NARROWEST))
            stub = rpc.InferenceStub(channel)
            flood = [stub.Generate(asked("abc")) for _ in range(AT_ONCE // 4)]
            # A request is refused, or is ended when its answer is not read.
            await until(lambda: is_busy(client))
            assert await nothing_left(client, PATIENCE_S)
            unread += [call for call in flood if not call.done()]
        await check_others(server.address)
        longest_s, taken = await probing, memory_bytes(server.process.pid) - before
        print(f"{len(unread)} unread: {taken >> 20} MB, longest health check {longest_s:.3f} s")
        # time: what probes wait
        assert longest_s < 1.0, "a probe would have given up"
        assert taken < len(unread) * (100 << 10)


async def is_busy(client: AsyncClient) -> bool:
    return (await client.status()).num_running > 0


async def longest_check(address: str, is_over: Callable[[], bool]) -> float:
    """Return the duration of the slowest health check, in seconds."""
    longest_s = 0.0
    while not is_over():
        began = time.monotonic()
        assert await is_serving(address)
        longest_s = max(longest_s, time.monotonic() - began)
        await asyncio.sleep(0.05)  # time: between two probes
    return longest_s


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
