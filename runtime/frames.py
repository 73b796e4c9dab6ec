"""A decode rank's frames over a socket of their own: length-prefixed bytes, no pickle.

The reader greets with a token that it was told over control and with its session; the server
answers with one byte once the reader is subscribed, so that no frame of a later call is missed.
From then on each byte of the reader is a heartbeat, answered by a frame that holds a Beat.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from core.errors import NodeLost, RankDied
from core.membership import FrameAddress
from core.schema import Failure, encode_failure, error_of, unpack

log = logging.getLogger(__name__)

Frame = bytes | BaseException
"""A packed TokenFrame, or what ended the engine that made them."""


class Publisher(Protocol):
    """What makes the frames: a decode node."""

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        """Call ``reader`` with every frame of ``session`` from now on; returns what ends that."""
        ...

    def beat(self, session: int) -> None:
        """A heartbeat of ``session`` has come."""
        ...


GREETING_TIMEOUT_S = 10.0
MAX_UNREAD_BYTES = 64 << 20
"""A reader further behind than this is cut off, or a node's memory would fill."""
MAX_SILENT_READERS = 64
"""Who have not greeted yet: another one ends the oldest."""
_TOKEN_BYTES = 32
_HELLO, _BEAT = b"\x06", b"\x01"
_SESSION = struct.Struct("!Q")
_HEADER = struct.Struct("!I")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class FrameServer:
    """Sends a session its frames when it greets with the token. Owned by one loop."""

    def __init__(self, host: str, publisher: Publisher) -> None:
        self._host = host
        self._publisher = publisher
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._silent: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

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
        return FrameAddress(self._host, self._server.sockets[0].getsockname()[1], self._token)

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
        self._connections[task] = self._silent[task] = writer
        if len(self._silent) > MAX_SILENT_READERS:
            self._silent.pop(next(iter(self._silent))).transport.abort()
        try:
            _keep_alive(writer)
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                greeting = await reader.readexactly(_TOKEN_BYTES)
                session = _SESSION.unpack(await reader.readexactly(_SESSION.size))[0]
            self._silent.pop(task, None)
            if hmac.compare_digest(greeting, self._token):
                await self._send(session, reader, writer)
            else:
                log.warning("a reader of frames came with a wrong token")
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("a reader of frames is gone: %r", error)
        finally:
            self._silent.pop(task, None)
            del self._connections[task]
            writer.close()

    async def _send(
        self, session: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send frames and hear heartbeats until the reader hangs up."""

        def send(frame: Frame) -> None:
            if isinstance(frame, BaseException):
                text = f"the decode engine stopped: {frame!r}"
                writer.write(_HEADER.pack(0) + encode_failure(RankDied(text)))
                writer.close()
            elif writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                log.error("a reader of frames is %d bytes behind: cut off", MAX_UNREAD_BYTES)
                writer.transport.abort()
            else:
                writer.write(_HEADER.pack(len(frame)) + frame)

        unsubscribe = self._publisher.subscribe(session, send)
        try:
            writer.write(_HELLO)
            while await reader.read(1):
                self._publisher.beat(session)
        finally:
            unsubscribe()


class FrameStream:
    """An open connection to a FrameServer; made by ``connect``."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._name = name
        self._reader = reader
        self._writer = writer

    def beat(self) -> None:
        """Send a heartbeat; its answer comes among the frames."""
        self._writer.write(_BEAT)

    def close(self) -> None:
        self._writer.close()

    async def frames(self) -> AsyncIterator[bytes]:
        """Packed TokenFrames. Raises RankDied when the engine or, by its silence, the node has
        ended, and closes the connection then."""
        read = self._reader.readexactly
        try:
            while (num_bytes := _HEADER.unpack(await read(_HEADER.size))[0]) > 0:
                yield await read(num_bytes)
            raise error_of(unpack(Failure, await self._reader.read()))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RankDied(f"{self._name}: its frames ended: {error}") from error
        finally:
            self._writer.close()


async def connect(name: str, address: FrameAddress, session: int) -> FrameStream:
    """Subscribe to the frames that the rank ``name`` has for ``session``.

    Raises NodeLost if it does not answer.
    """
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            _keep_alive(writer)
            writer.write(address.token + _SESSION.pack(session))
            await reader.readexactly(len(_HELLO))
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise NodeLost(
            f"{name}: no frames from {address.host}:{address.port}: {error!r}; can this machine "
            "reach that address (kv_transfer.host)?"
        ) from error
    return FrameStream(name, reader, writer)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Notice within half a minute that the other machine is gone without a word."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
