"""Framing of all connections between processes: a length of four bytes, then the data.

The first frame of a client is its greeting: a secret token, which it received over a control
connection, and data that identify the client. Most functions process bytes only; their callers read
and write the sockets, with asyncio or a thread.
"""

import hmac
import secrets
import socket
import struct
import time
from asyncio import StreamReader
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

Peer = TypeVar("Peer")
GREETING_S = 10.0
MAX_PENDING_HANDSHAKES = 256
"""Maximum number of connections whose greeting has not arrived. One more ends the oldest.

It is well above ACCEPTS_PER_TURN, so that a greeting that has arrived is read before its connection
can be ended.
"""
ACCEPTS_PER_TURN = 16
"""Maximum number of connections that asyncio accepts before it reads from existing ones."""
BACKLOG = 4096
"""Maximum number of connections that the kernel queues for acceptance.

The system's limit somaxconn may be lower.
"""
RECEIVE_BYTES = 1 << 16
TOKEN_BYTES = 32
_LENGTH = struct.Struct("!I")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def encode_frame(data: bytes) -> bytes:
    """Return ``data`` as one frame."""
    return _LENGTH.pack(len(data)) + data


class FrameDecoder:
    """Splits the byte stream of a connection into frames of at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    @property
    def num_bytes_needed(self) -> int:
        """Bytes missing from the next frame, or from its length field if that is incomplete."""
        return (self._end() or _LENGTH.size) - len(self._bytes)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes and yield the frames that are complete.

        Raises ValueError as soon as the length field of a frame exceeds ``max_bytes``.
        """
        self._bytes += data
        while (end := self._end()) and len(self._bytes) >= end:
            frame = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield frame

    def _end(self) -> int:
        """Return the end of the next frame in the buffer, 0 while its length is unknown."""
        if len(self._bytes) < _LENGTH.size:
            return 0
        [num_bytes] = _LENGTH.unpack_from(self._bytes)
        if num_bytes > self._max_bytes:
            raise ValueError(
                f"a frame has {num_bytes} bytes, at most {self._max_bytes} are allowed"
            )
        return _LENGTH.size + int(num_bytes)


class PendingHandshakes(Generic[Peer]):
    """Connections whose greeting is not complete.

    At most MAX_PENDING_HANDSHAKES are kept, each for at most GREETING_S seconds; the oldest are
    rejected first. Owned by one thread, which calls ``sweep`` GREETING_S after each ``add``.

    Args:
        num_bytes: Length of the data that follow the token in a greeting.
        reject: Callback that ends a rejected connection.

    Attributes:
        token: Random secret that a greeting must begin with.
    """

    def __init__(self, num_bytes: int, reject: Callable[[Peer], None]) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._max_bytes = TOKEN_BYTES + num_bytes
        self._reject = reject
        self._waiting: dict[Peer, tuple[float, FrameDecoder]] = {}
        """Time of acceptance and received bytes of each connection, oldest first."""

    def add(self, peer: Peer) -> None:
        self._waiting[peer] = time.monotonic(), FrameDecoder(self._max_bytes)
        self.sweep()

    def num_bytes_needed(self, peer: Peer) -> int:
        """Return the number of bytes to read next, which never exceeds the greeting."""
        return self._waiting[peer][1].num_bytes_needed

    def feed(self, peer: Peer, data: bytes) -> bytes | None:
        """Add received bytes. Return the data after the token once the greeting is complete.

        Returns None before that. A connection with a complete greeting is no longer pending.

        Raises:
            ConnectionError: The token or length is wrong, or the connection ended or was rejected.
            ValueError: The greeting is too long.
        """
        if not data or peer not in self._waiting:
            raise ConnectionError("the connection sent no greeting in time")
        for greeting in self._waiting[peer][1].feed(data):
            is_known = hmac.compare_digest(greeting[:TOKEN_BYTES], self.token)
            if not is_known or len(greeting) != self._max_bytes:
                raise ConnectionError("the greeting has a wrong secret or length")
            self.forget(peer)
            return greeting[TOKEN_BYTES:]
        return None

    def forget(self, peer: Peer) -> None:
        """Remove a connection, if it is pending, without rejecting it."""
        self._waiting.pop(peer, None)

    def sweep(self) -> None:
        """Reject connections that are late, and the oldest ones above the maximum number."""
        while self._waiting:
            peer, (came_at, _) = next(iter(self._waiting.items()))
            is_late = time.monotonic() - came_at >= GREETING_S
            if not is_late and len(self._waiting) <= MAX_PENDING_HANDSHAKES:
                return
            self.forget(peer)
            self._reject(peer)


def read_frames(connection: socket.socket, decoder: FrameDecoder) -> Iterator[bytes]:
    """Block until bytes arrive and return the frames that they complete.

    Raises:
        OSError: The connection failed or was closed by the peer.
        ValueError: A frame is too long.
    """
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionError("the peer closed the connection")
    return decoder.feed(data)


async def iter_frames(reader: StreamReader, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield frames until the peer closes the connection; an incomplete frame is dropped.

    Raises:
        OSError: The connection failed.
        ValueError: A frame is longer than ``max_bytes``.
    """
    decoder = FrameDecoder(max_bytes)
    while data := await reader.read(RECEIVE_BYTES):
        for frame in decoder.feed(data):
            yield frame


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keepalive, which detects a vanished peer machine within 30 seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shutdown_socket(connection: socket.socket) -> None:
    """Shut a socket down. The peer, and a thread that reads the socket, see its end at once.

    The local reader must close the socket.
    """
    with suppress(OSError):  # the peer has closed it already
        connection.shutdown(socket.SHUT_RDWR)
