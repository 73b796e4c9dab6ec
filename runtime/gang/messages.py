"""What a rank and its gang's planner tell each other, length-prefixed over one connection."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from core.schema import Message, pack, unpack

_LENGTH = struct.Struct("!H")
"""Bounds what one message can ask the other end to hold; those of a step have some 100 bytes."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """A rank's packed proposal for a step."""

    step: int
    proposal: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """Of a step: its packed key, None if no rank has work. Where ``is_asked`` a proposal is wanted
    instead, and there is no key yet."""

    step: int
    key: bytes | None = None
    is_asked: bool = False


def send(connection: socket.socket, message: Proposed | Told) -> None:
    data = pack(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


class Inbox(Generic[Message]):
    """Bytes of a connection as they come, cut into messages of the class ``of``."""

    def __init__(self, of: type[Message]) -> None:
        self._of = of
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack(self._bytes[: _LENGTH.size])[0]
            if len(self._bytes) < end:
                return
            message = unpack(self._of, bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
            yield message
