"""A decode rank's frames over a socket of their own (wires/framing.py), no pickle.

The reader greets with a token that it was told over control and with its session; the server
answers with an empty frame once the reader is subscribed, so that none of a later call is missed.
From then on each empty frame of the reader is a heartbeat, answered by one that holds a Beat.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from core.errors import RankDied, RankLost
from core.membership import FrameAddress
from core.schema import Failure, encode_failure, error_of, unpack
from wires.framing import GREETING_S, Strangers, framed, keep_alive, receive

log = logging.getLogger(__name__)

Frame = bytes | BaseException
"""A packed TokenFrame, or what ended the engine that made them."""


class Publisher(Protocol):
    """What makes the frames: a decode node."""

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        """Call ``reader`` with every frame of ``session`` from now on; returns what ends that."""

    def beat(self, session: int) -> None:
        """A heartbeat of ``session`` has come."""


MAX_UNREAD_BYTES = 64 << 20
"""A reader further behind is cut off, or a node's memory would fill; no frame is longer."""
_SESSION = struct.Struct("!Q")
_EMPTY = framed(b"")


class FrameServer:
    """Sends a session its frames when it greets with the token. Owned by one loop."""

    def __init__(self, host: str, publisher: Publisher) -> None:
        self._host = host
        self._publisher = publisher
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._strangers = Strangers[asyncio.StreamWriter](
            _SESSION.size, lambda one: one.transport.abort()
        )

    async def listen(self) -> FrameAddress:
        """Listen on ``host`` only, on a port of the system's choice."""
        if self._server is None:
            try:
                self._server = await asyncio.start_server(self._serve, self._host, 0)
            except OSError as error:
                raise ValueError(
                    f"kv_transfer.host={self._host!r}: frames cannot be served there ({error}); "
                    "set it to an address of this machine"
                ) from error
        port = self._server.sockets[0].getsockname()[1]
        return FrameAddress(self._host, port, self._strangers.token)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        self._strangers.come(writer)
        asyncio.get_running_loop().call_later(GREETING_S, self._strangers.sweep)
        hello = None
        try:
            keep_alive(writer.get_extra_info("socket"))
            while hello is None:
                data = await reader.read(self._strangers.num_wanted(writer))
                hello = self._strangers.hear(writer, data)
            await self._send(_SESSION.unpack(hello)[0], reader, writer)
        except (OSError, ValueError) as error:
            level = logging.WARNING if hello is None else logging.INFO
            log.log(level, "a reader of frames is gone: %r", error)
        finally:
            self._strangers.forget(writer)
            del self._connections[task]
            writer.close()

    async def _send(
        self, session: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send frames and hear heartbeats until the reader hangs up."""

        def send(frame: Frame) -> None:
            if isinstance(frame, BaseException):
                text = f"the decode engine stopped: {frame!r}"
                writer.write(_EMPTY + framed(encode_failure(RankDied(text))))
                writer.close()
            elif writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                log.error("a reader of frames is %d bytes behind: cut off", MAX_UNREAD_BYTES)
                writer.transport.abort()
            else:
                writer.write(framed(frame))

        unsubscribe = self._publisher.subscribe(session, send)
        try:
            writer.write(_EMPTY)
            async for _ in receive(reader, 0):
                self._publisher.beat(session)
        finally:
            unsubscribe()


@dataclass(frozen=True, slots=True)
class FrameStream:
    """An open connection to a FrameServer; made by ``connect``."""

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def beat(self) -> None:
        """Send a heartbeat; its answer comes among the frames."""
        self.writer.write(_EMPTY)

    def close(self) -> None:
        self.writer.close()

    async def frames(self) -> AsyncIterator[bytes]:
        """Packed TokenFrames. Raises RankDied when the engine or, by its silence, the node has
        ended, and closes the connection then."""
        try:
            frames = receive(self.reader, MAX_UNREAD_BYTES)
            async for frame in frames:
                if not frame:
                    raise error_of(unpack(Failure, await anext(frames)))
                yield frame
            raise ConnectionError("closed")
        except (OSError, ValueError, StopAsyncIteration) as error:
            raise RankDied(f"{self.name}: its frames ended: {error}") from error
        finally:
            self.writer.close()


async def connect(name: str, address: FrameAddress, session: int) -> FrameStream:
    """Subscribe to the frames that the rank ``name`` has for ``session``.

    Raises RankLost if it does not answer.
    """
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            keep_alive(writer.get_extra_info("socket"))
            writer.write(framed(address.token + _SESSION.pack(session)))
            await reader.readexactly(len(_EMPTY))
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise RankLost(
            f"{name}: no frames from {address.host}:{address.port}: {error!r}; can this machine "
            "reach that address (kv_transfer.host)?"
        ) from error
    return FrameStream(name, reader, writer)
