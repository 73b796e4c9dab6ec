"""One framing for connections between processes: a length, then so many bytes.

The first frame of who connects is its greeting: a token that it was told over control, and who it
is. What is here decides over bytes; those who own sockets, of asyncio or of a thread, move them.
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
"""Maximum of connections that have not greeted yet: another one ends the oldest. It is well above
ACCEPTS_PER_TURN, so that a greeting that has arrived is read before its connection is ended."""
ACCEPTS_PER_TURN = 16
"""Maximum of connections that an asyncio listener takes in before it reads from those it has."""
BACKLOG = 4096
"""Connections that the kernel may keep until they are accepted; it lowers this to somaxconn."""
RECEIVE_BYTES = 1 << 16
TOKEN_BYTES = 32
_LENGTH = struct.Struct("!I")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def encode_frame(data: bytes) -> bytes:
    """``data`` as one frame."""
    return _LENGTH.pack(len(data)) + data


class FrameDecoder:
    """Bytes of a connection as they come, cut into frames of at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    @property
    def num_bytes_needed(self) -> int:
        """Bytes that the next frame lacks, or its length; never more than that has to say."""
        return (self._end() or _LENGTH.size) - len(self._bytes)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole now. Raises ValueError at the length of one that is too long:
        nobody waits for it."""
        self._bytes += data
        while (end := self._end()) and len(self._bytes) >= end:
            frame = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield frame

    def _end(self) -> int:
        """Of the next frame, 0 while its length is not known."""
        if len(self._bytes) < _LENGTH.size:
            return 0
        [num_bytes] = _LENGTH.unpack_from(self._bytes)
        if num_bytes > self._max_bytes:
            raise ValueError(f"a frame of {num_bytes} bytes, {self._max_bytes} are the most")
        return _LENGTH.size + int(num_bytes)


class PendingHandshakes(Generic[Peer]):
    """Who has connected and not greeted yet. At most MAX_PENDING_HANDSHAKES, and each for
    GREETING_S: those beyond are told to ``turn_away``, the oldest first. A greeting is the
    ``token`` and ``num_bytes`` more. Owned by one thread, which calls ``sweep`` GREETING_S after
    the last came.
    """

    def __init__(self, num_bytes: int, reject: Callable[[Peer], None]) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._max_bytes = TOKEN_BYTES + num_bytes
        self._reject = reject
        self._waiting: dict[Peer, tuple[float, FrameDecoder]] = {}
        """When each came, and what it has said."""

    def add(self, peer: Peer) -> None:
        self._waiting[peer] = time.monotonic(), FrameDecoder(self._max_bytes)
        self.sweep()

    def num_bytes_needed(self, peer: Peer) -> int:
        """Bytes to read of it: none of what follows its greeting."""
        return self._waiting[peer][1].num_bytes_needed

    def feed(self, peer: Peer, data: bytes) -> bytes | None:
        """What follows the token in its greeting, None while that is not whole; it is no stranger
        then. Raises ConnectionError or ValueError if it has none, or another."""
        if not data or peer not in self._waiting:
            raise ConnectionError("no greeting came, or none in time")
        for greeting in self._waiting[peer][1].feed(data):
            is_known = hmac.compare_digest(greeting[:TOKEN_BYTES], self.token)
            if not is_known or len(greeting) != self._max_bytes:
                raise ConnectionError("it came with a wrong token")
            self.forget(peer)
            return greeting[TOKEN_BYTES:]
        return None

    def forget(self, peer: Peer) -> None:
        """It has gone, or may have."""
        self._waiting.pop(peer, None)

    def sweep(self) -> None:
        """Turn away connections that are late, and the oldest of too many."""
        while self._waiting:
            peer, (came_at, _) = next(iter(self._waiting.items()))
            is_late = time.monotonic() - came_at >= GREETING_S
            if not is_late and len(self._waiting) <= MAX_PENDING_HANDSHAKES:
                return
            self.forget(peer)
            self._reject(peer)


def read_frames(connection: socket.socket, decoder: FrameDecoder) -> Iterator[bytes]:
    """Frames that are whole by what comes next; blocks for that. Raises OSError, also if the other
    end has closed, and what Inbox does."""
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionError("the other end has closed")
    return decoder.feed(data)


async def iter_frames(reader: StreamReader, max_bytes: int) -> AsyncIterator[bytes]:
    """Frames until the other end closes, also within one. Raises OSError, and what Inbox does."""
    decoder = FrameDecoder(max_bytes)
    while data := await reader.read(RECEIVE_BYTES):
        for frame in decoder.feed(data):
            yield frame


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shutdown_socket(connection: socket.socket) -> None:
    """The other end, and whoever reads here, see it at once; who reads here closes it."""
    with suppress(OSError):  # the other end was first
        connection.shutdown(socket.SHUT_RDWR)
