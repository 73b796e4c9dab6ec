"""Socket through which a decode rank sends token frames to gateways (format: net/framing.py).

A gateway connects and sends the socket's secret token, which it received in a control call, and its
session number. The rank replies with an empty frame once the gateway is subscribed. The gateway
therefore misses no frame that its later calls cause. After that, each empty frame from the gateway
is a heartbeat. The rank replies with a frame that holds a Heartbeat. Frames are parsed without
pickle.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.core.errors import RankDied
from tandem.core.membership import PortAddress
from tandem.core.schema import Failure, encode_failure, to_error, unpack
from tandem.net import listener
from tandem.net.framing import encode_frame, iter_frames
from tandem.net.listener import EMPTY_FRAME, Listener

log = logging.getLogger(__name__)

Frame = bytes | BaseException
"""A packed TokenFrame, or the error that ended the engine."""


class Publisher(Protocol):
    """Interface of the source of frames, which a decode rank implements (FramePublisher)."""

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        """Call ``reader`` with every new frame of ``session``; return an unsubscribe function."""

    def on_heartbeat(self, session: int) -> None:
        """Handle a heartbeat that the gateway of ``session`` has sent."""


MAX_UNREAD_BYTES = 64 << 20
"""Maximum number of bytes that wait for one reader. A reader that exceeds it is disconnected, which
bounds the rank's memory. Also the maximum length of a frame."""
_SESSION = struct.Struct("!Q")


class FrameServer(Listener):
    """Sends frames to each gateway that sends the secret token. Owned by one asyncio loop."""

    def __init__(self, host: str, publisher: Publisher) -> None:
        super().__init__(host, _SESSION.size, self._send)
        self._publisher = publisher

    async def _send(
        self, greeting: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send frames to the reader and receive its heartbeats until it disconnects."""
        [session] = _SESSION.unpack(greeting)

        def send(frame: Frame) -> None:
            if isinstance(frame, BaseException):
                text = f"the decode engine stopped: {frame!r}"
                writer.write(EMPTY_FRAME + encode_frame(encode_failure(RankDied(text))))
                writer.close()
            elif writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                log.error(
                    "a gateway left %d bytes of frames unread: disconnecting it", MAX_UNREAD_BYTES
                )
                writer.transport.abort()
            else:
                writer.write(encode_frame(frame))

        unsubscribe = self._publisher.subscribe(session, send)
        try:
            async for _ in iter_frames(reader, 0):
                self._publisher.on_heartbeat(session)
        finally:
            unsubscribe()


@dataclass(frozen=True, slots=True)
class FrameStream:
    """A gateway's open connection to a FrameServer; created by ``connect``."""

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send_heartbeat(self) -> None:
        """Send a heartbeat. The reply is one of the frames that ``frames`` yields."""
        self.writer.write(EMPTY_FRAME)

    def close(self) -> None:
        self.writer.close()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield packed TokenFrames until the connection ends.

        Raises RankDied if the engine has stopped or the connection is lost. The connection is then
        closed.
        """
        try:
            frames = iter_frames(self.reader, MAX_UNREAD_BYTES)
            async for frame in frames:
                if not frame:
                    raise to_error(unpack(Failure, await anext(frames)))
                yield frame
            raise ConnectionError("closed")
        except (OSError, ValueError, StopAsyncIteration) as error:
            raise RankDied(f"{self.name}: its stream of tokens ended: {error}") from error
        finally:
            self.writer.close()


async def connect(name: str, address: PortAddress, session: int) -> FrameStream:
    """Connect to the rank ``name`` and subscribe to the frames of ``session``.

    Raises RankLost if the rank does not reply.
    """
    return FrameStream(name, *await listener.connect(name, address, _SESSION.pack(session)))
