"""Errors that travel as messages: bytes cross Ray and sockets, never pickled exceptions."""

from dataclasses import dataclass
from typing import TypeVar

import msgpack

from core import errors
from core.schema import pack, unpack

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind`` is the name of a class in core.errors, or ValueError; others become Internal."""

    kind: str
    text: str
    retry_after_s: float = 0.0


def encode_failure(error: BaseException) -> bytes:
    kind = type(error).__name__
    if isinstance(error, ValueError):
        kind = "ValueError"
    return pack(Failure(kind, str(error), getattr(error, "retry_after_s", 0.0)))


def decode(cls: type[Message], data: bytes) -> Message:
    """``data`` as ``cls``; if it holds a Failure instead, raises the error it names."""
    if _name(data) == Failure.__name__:
        raise_failure(unpack(Failure, data))
    return unpack(cls, data)


def raise_failure(failure: Failure) -> None:
    if failure.kind == "ValueError":
        raise ValueError(failure.text)
    if failure.kind == "Overloaded":
        raise errors.Overloaded(failure.text, failure.retry_after_s)
    known = getattr(errors, failure.kind, None)
    if isinstance(known, type) and issubclass(known, errors.TandemError):
        raise known(failure.text)
    raise errors.TandemError(f"{failure.kind}: {failure.text}")


def _name(data: bytes) -> str:
    body = msgpack.unpackb(data)
    return body[0] if isinstance(body, list) and body else ""
