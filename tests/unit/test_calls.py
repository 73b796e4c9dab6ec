"""Calls over a separate connection: concurrent, to one epoch, and only with its token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tandem.core.control import InProcessControl, Service
from tandem.core.errors import RankLost
from tandem.core.membership import PortAddress
from tandem.net import calls, listener
from tandem.net.calls import CALL_ADDRESS, CallClient, CallServer
from tests.waiting import PATIENCE_S, turns, until

EPOCH = 2**40


class Answers:
    """A rank that echoes each call. It answers "slow" once ``may`` is set."""

    def __init__(self) -> None:
        self.may, self.ended = asyncio.Event(), list[str]()

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes:
        try:
            if method == "slow":
                await self.may.wait()
            return f"{epoch} {method} ".encode() + payload
        finally:
            self.ended.append(method)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Answers, CallServer, CallClient, list[PortAddress]]]:
    """Serve calls to an ``Answers`` rank. The last of ``addresses`` is the one that clients
    find."""
    rank, addresses = Answers(), list[PortAddress]()
    server = CallServer("127.0.0.1", rank.handle)
    addresses.append(await server.listen())
    door = Service("p", EPOCH, {CALL_ADDRESS: (None, lambda _: addresses[-1])})
    client = CallClient("p", EPOCH, InProcessControl(door.handle, EPOCH))
    yield rank, server, client, addresses
    await client.close()
    await server.stop()
    assert not server._connections and not client._waiting


async def test_each_call_is_answered_when_it_is_done() -> None:
    async with served() as (rank, server, client, _):
        slow = asyncio.create_task(client.call("slow", b"1"))
        others = [client.call("other", b"%d" % i) for i in range(50)]
        assert await asyncio.gather(*others) == [b"%d other %d" % (EPOCH, i) for i in range(50)]
        assert not slow.done() and len(server._connections) == 1
        rank.may.set()
        assert await slow == b"%d slow 1" % EPOCH


async def test_what_is_asked_for_no_longer_is_not_waited_for_nor_mistaken() -> None:
    async with served() as (rank, _, client, _):
        slow = asyncio.create_task(client.call("slow", b""))
        assert await client.call("first", b"") == b"%d first " % EPOCH
        slow.cancel()
        await turns(3)
        rank.may.set()
        assert await client.call("next", b"") == b"%d next " % EPOCH
        assert rank.ended == ["first", "slow", "next"]


async def test_calls_under_way_fail_with_the_connection_and_later_ones_open_another() -> None:
    async with served() as (rank, server, client, _):
        slow = asyncio.create_task(client.call("slow", b""))
        await client.call("first", b"")
        for writer in server._connections.values():
            writer.transport.abort()
        with pytest.raises(RankLost, match="p: its connection ended"):
            await slow
        await until(lambda: rank.ended == ["first", "slow"])
        assert await client.call("next", b"") == b"%d next " % EPOCH


async def test_nobody_is_answered_without_the_token() -> None:
    async with served() as (rank, _, client, addresses):
        right = addresses[0]
        addresses.append(replace(right, token=bytes(len(right.token))))
        with pytest.raises(RankLost, match="no answer from"):
            await client.call("first", b"")
        assert not rank.ended
        addresses.append(right)
        assert await client.call("first", b"") == b"%d first " % EPOCH


async def test_who_is_not_answered_leaves_no_connection_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 0.1)
    is_over = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        is_over.set()
        writer.close()

    async with await asyncio.start_server(hear, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RankLost, match="p: no answer"):
            await listener.connect("p", PortAddress("127.0.0.1", port, b"token"), b"")
        async with asyncio.timeout(PATIENCE_S):
            await is_over.wait()


async def test_a_connection_without_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "IDLE_S", 0.1)
    async with served() as (_, server, client, _):
        await client.call("first", b"")
        reading = client._reading
        assert reading is not None
        await until(lambda: not server._connections and reading.done())
        assert await client.call("next", b"") == b"%d next " % EPOCH


async def test_a_call_longer_than_any_may_be_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "MAX_CALL_BYTES", 100)
    async with served() as (rank, _, client, _):
        with pytest.raises(RankLost):
            await client.call("first", bytes(101))
        assert not rank.ended
