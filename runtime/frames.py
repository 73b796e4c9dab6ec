"""Token frames of a decode rank, sent over a separate socket (net/framing.py) without pickle.

The reader greets with a token, which it received over control, and with its session. The server
replies with an empty frame once the reader is subscribed, so that the reader misses no frame of its
later calls. Each further empty frame from the reader is a heartbeat. The reply to it is a frame
that holds a Heartbeat.
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
    """Source of the frames: a decode node."""

    def subscribe(self, session: int, reader: Callable[[Frame], None]) -> Callable[[], None]:
        """Call ``reader`` with every new frame of ``session``. Returns a function to stop that."""

    def on_heartbeat(self, session: int) -> None:
        """Handle a heartbeat of ``session``."""


MAX_UNREAD_BYTES = 64 << 20
"""Maximum unread bytes per reader, above which the reader is disconnected to bound the node's
memory. Also the maximum length of a frame."""
_SESSION = struct.Struct("!Q")


class FrameServer(Listener):
    """Sends frames to each session that greets with the token. Owned by one event loop."""

    def __init__(self, host: str, publisher: Publisher) -> None:
        super().__init__(host, _SESSION.size, self._send)
        self._publisher = publisher

    async def _send(
        self, greeting: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send frames and receive heartbeats until the reader disconnects."""
        [session] = _SESSION.unpack(greeting)

        def send(frame: Frame) -> None:
            if isinstance(frame, BaseException):
                text = f"the decode engine stopped: {frame!r}"
                writer.write(EMPTY_FRAME + encode_frame(encode_failure(RankDied(text))))
                writer.close()
            elif writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                log.error("a reader of frames is %d bytes behind: cut off", MAX_UNREAD_BYTES)
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
    """An open connection to a FrameServer; created by ``connect``."""

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send_heartbeat(self) -> None:
        """Send a heartbeat. The reply is one of the frames."""
        self.writer.write(EMPTY_FRAME)

    def close(self) -> None:
        self.writer.close()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield packed TokenFrames.

        Raises RankDied, and closes the connection, if the engine ended or the connection is lost.
        """
        try:
            frames = iter_frames(self.reader, MAX_UNREAD_BYTES)
            async for frame in frames:
                if not frame:
                    raise to_error(unpack(Failure, await anext(frames)))
                yield frame
            raise ConnectionError("closed")
        except (OSError, ValueError, StopAsyncIteration) as error:
            raise RankDied(f"{self.name}: its frames ended: {error}") from error
        finally:
            self.writer.close()


async def connect(name: str, address: PortAddress, session: int) -> FrameStream:
    """Subscribe to the frames that the rank ``name`` has for ``session``.

    Raises RankLost if the rank does not answer.
    """
    return FrameStream(name, *await listener.connect(name, address, _SESSION.pack(session)))
