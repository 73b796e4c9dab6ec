"""Frames over a socket arrive in order, only with the token, and the stream's end names its
cause."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tandem.cluster.gateway.frame_reader import follow_rank
from tandem.cluster.gateway.handles import RankHandle
from tandem.core.errors import RankLost
from tandem.core.heartbeat import Heartbeat, RankLoad
from tandem.core.identity import Identity
from tandem.core.progress import EngineProgress
from tandem.core.request import ERROR, TokenFrame
from tandem.core.schema import pack
from tandem.core.tasks import Tasks, cancel_and_wait
from tandem.net import framing, listener
from tandem.runtime import frames as frame_stream
from tandem.runtime.frames import Frame, FrameServer, FrameStream, connect
from tests.unit.test_membership import INFO
from tests.waiting import PATIENCE_S, until


class Board:
    """Stands for a decode node: every session gets what is published, and its heartbeats are
    answered."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[Frame], None]] = {}

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        self.readers[session] = reader
        return lambda: self.readers.pop(session)  # type: ignore[return-value]

    def on_heartbeat(self, session: int) -> None:
        self.readers[session](b"beat of %d" % session)

    def publish(self, frame: Frame) -> None:
        for reader in self.readers.values():
            reader(frame)

    async def unread(self) -> None:
        """Wait until the last reader has left."""
        await until(lambda: not self.readers)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Board, FrameServer]]:
    board = Board()
    server = FrameServer("127.0.0.1", board)
    try:
        yield board, server
    finally:
        await server.stop()
        assert not board.readers and not server._connections


async def read_all(stream: FrameStream) -> list[bytes]:
    return [frame async for frame in stream.frames()]


async def test_every_frame_after_connect_arrives_in_order() -> None:
    async with served() as (board, server):
        streams = [await connect("d", await server.listen(), session) for session in range(2)]
        sent = [secrets.token_bytes(1 + 997 * i) for i in range(200)]
        for frame in sent:
            board.publish(frame)
        for stream in streams:
            frames = stream.frames()
            assert [await anext(frames) for _ in sent] == sent
            await frames.aclose()
        await board.unread()


async def test_a_heartbeat_is_answered_in_order_and_to_its_session_alone() -> None:
    async with served() as (board, server):
        one, other = [await connect("d", await server.listen(), session) for session in (2**53, 5)]
        board.publish(b"before")
        one.send_heartbeat()
        frames, others = one.frames(), other.frames()
        assert [await anext(frames) for _ in range(2)] == [b"before", b"beat of %d" % 2**53]
        board.publish(b"after")
        assert [await anext(others) for _ in range(2)] == [b"before", b"after"]
        await frames.aclose()
        await others.aclose()
        await board.unread()


async def test_nobody_reads_without_the_token() -> None:
    async with served() as (board, server):
        address = await server.listen()
        assert address.host == "127.0.0.1"
        with pytest.raises(RankLost, match=r"127\.0\.0\.1"):
            await connect("d", replace(address, token=bytes(32)), 1)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"x" * 5)
        writer.write_eof()
        assert await reader.read() == b"" and not board.readers
        writer.close()


async def test_the_end_of_the_engine_is_told() -> None:
    async with served() as (board, server):
        stream = await connect("d", await server.listen(), 7)
        board.publish(b"last")
        board.publish(RuntimeError("out of memory"))
        frames = stream.frames()
        assert await anext(frames) == b"last"
        with pytest.raises(RankLost, match="out of memory"):
            await anext(frames)
        await board.unread()


async def test_a_beat_tells_only_of_what_was_granted_before_it_was_sent() -> None:
    """A grant made while a heartbeat is in flight cannot be in its reply and must not count as
    lost."""
    early, late = Identity("early"), Identity("late")
    beat = Heartbeat(EngineProgress(0, 0.0, 60.0), RankLoad(num_active_rows=1), alive=(early,))
    beats = asyncio.Queue[int]()
    async with served() as (board, server):
        board.on_heartbeat = beats.put_nowait  # type: ignore[method-assign]
        handle = RankHandle(replace(INFO, frames=await server.listen()), Mock(), Tasks())
        inboxes = {one: handle.inboxes.open(one) for one in (early, late)}
        handle.inboxes.granted[early] = None
        hearing = asyncio.create_task(follow_rank(handle, 7, 0.01, 60.0, Mock()))
        await beats.get()
        handle.inboxes.granted[late] = None
        board.publish(pack(TokenFrame((), beat)))
        await handle.liveness.answering.wait()
        assert inboxes[late].empty(), "lost before anybody could tell of it"
        while inboxes[late].empty():
            await beats.get()
            board.publish(pack(TokenFrame((), beat)))
            await asyncio.sleep(0)
        assert inboxes[late].get_nowait().finish_reason == ERROR and inboxes[early].empty()
        await cancel_and_wait(hearing)
        await board.unread()


async def test_a_node_that_closes_is_lost() -> None:
    async with served() as (_, server):
        stream = await connect("decode-3", await server.listen(), 7)
        await server.stop()
        with pytest.raises(RankLost, match="decode-3"):
            await read_all(stream)


async def test_a_reader_far_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_stream, "MAX_UNREAD_BYTES", 1 << 16)
    async with served() as (board, server):
        stream = await connect("d", await server.listen(), 7)
        for _ in range(400):
            board.publish(bytes(1 << 16))
            await asyncio.sleep(0)
            if not board.readers:
                break
        assert not board.readers, "the node would have kept 25 MB for it"
        with pytest.raises(RankLost):
            await read_all(stream)


async def test_a_host_of_another_machine_is_explained() -> None:
    server = FrameServer("192.0.2.1", Board())
    with pytest.raises(ValueError, match=r"kv_transfer\.host='192\.0\.2\.1'"):
        await server.listen()


async def test_a_reader_who_does_not_greet_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (framing, listener):
        monkeypatch.setattr(module, "GREETING_S", 0.1)
    async with served() as (_, server):
        address = await server.listen()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"\x00")
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: not server._connections)


async def test_a_frame_longer_than_any_may_be_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_stream, "MAX_UNREAD_BYTES", 8)
    async with served() as (board, server):
        stream = await connect("d", await server.listen(), 1)
        board.publish(b"ninebytes")
        with pytest.raises(RankLost, match="a frame has 9 bytes, at most 8 are allowed"):
            await read_all(stream)
        await board.unread()


async def test_readers_who_do_not_greet_are_few_and_shut_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections that send no handshake are limited in number and keep no other out, also before
    their handshake times out."""
    monkeypatch.setattr(framing, "GREETING_S", 10 * PATIENCE_S)
    async with served() as (board, server):
        address, silent = await server.listen(), framing.MAX_PENDING_HANDSHAKES
        strangers = [
            await asyncio.open_connection(address.host, address.port) for _ in range(silent + 20)
        ]
        await until(lambda: len(server._connections) <= silent)
        stream = await connect("d", address, 1)
        board.publish(b"frame")
        frames = stream.frames()
        assert await anext(frames) == b"frame"
        await frames.aclose()
        for _, writer in strangers:
            writer.close()
        await board.unread()
