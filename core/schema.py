"""msgpack messages with checked schemas.

A message is a frozen dataclass. On the wire it is ``[class name, {field: value}]``, so a
reader can name what it got. Supported field types: int, float, bool, str, bytes, other
messages, ``tuple[X, ...]``, ``dict[str, X]`` and ``X | None``.

How a type is written and read is worked out once: a gateway reads a frame of every decode rank
in every step.
"""

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

Message = TypeVar("Message")
Convert = Callable[[Any], Any]


class WireError(ValueError):
    """A message that does not match its schema; the text gives both sides' values."""


def pack(message: Any) -> bytes:
    """Encode a message dataclass; its own field values are trusted (they are ours)."""
    cls: Any = type(message)
    return msgpack.packb([cls.__name__, _writer(cls)(message)])


def unpack(cls: type[Message], data: bytes) -> Message:
    """Decode ``data`` as ``cls``.

    Raises WireError when the bytes are not msgpack, name another message, lack a field,
    carry an unknown one, or hold a value of the wrong type.
    """
    try:
        body = msgpack.unpackb(data)
    except Exception as error:
        raise WireError(f"expected {cls.__name__}, got bytes that are not msgpack") from error
    if not (isinstance(body, list) and len(body) == 2 and isinstance(body[1], dict)):
        raise WireError(f"expected {cls.__name__} as [name, fields], got {body!r:.200}")
    if body[0] != cls.__name__:
        raise WireError(f"expected message {cls.__name__}, got {body[0]!r:.80}")
    checked: Any = cls
    try:
        message: Message = _reader(checked)(body[1])
    except _Mismatch as mismatch:
        raise WireError(f"{cls.__name__}{mismatch.path}: {mismatch.text}") from None
    return message


class _Mismatch(Exception):
    """``path`` leads from the message to what is wrong, and grows on the way up."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.path = ""

    def under(self, step: str) -> "_Mismatch":
        self.path = step + self.path
        return self


def _refuse(expected: Any, value: Any) -> NoReturn:
    name = getattr(expected, "__name__", str(expected))
    raise _Mismatch(f"expected {name}, got {type(value).__name__} {value!r:.80}")


def _as_it_is(value: Any) -> Any:
    return value


@cache
def _writer(expected: Any) -> Convert:
    """From a value of a field type to what msgpack takes."""
    origin, parts = get_origin(expected), get_args(expected)
    if is_dataclass(expected):
        return _message_writer(expected)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        write = _writer(_inner(parts))
        return write if write is _as_it_is else lambda v: None if v is None else write(v)
    write = _writer(parts[-1] if origin is dict else parts[0]) if origin else _as_it_is
    if write is _as_it_is:
        return _as_it_is
    if origin is dict:
        return lambda values: {key: write(value) for key, value in values.items()}
    return lambda values: [write(value) for value in values]


def _message_writer(cls: type) -> Convert:
    parts = [(name, _writer(hint)) for name, hint in _schema(cls).items()]

    def write(message: Any) -> dict[str, Any]:
        return {name: convert(getattr(message, name)) for name, convert in parts}

    return write


@cache
def _reader(expected: Any) -> Convert:
    """From what msgpack gives to a checked value of a field type; raises _Mismatch."""
    origin, parts = get_origin(expected), get_args(expected)
    if is_dataclass(expected):
        return _message_reader(expected)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        read = _reader(_inner(parts))
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(expected, _reader(parts[0]))
    if origin is dict:
        return _dict_reader(expected, _reader(parts[1]))
    if expected is float:
        return _read_float
    return lambda value: value if type(value) is expected else _refuse(expected, value)


def _read_float(value: Any) -> float:
    if type(value) is int:
        return float(value)
    return value if type(value) is float else _refuse(float, value)


def _message_reader(cls: type) -> Convert:
    schema = _schema(cls)
    names, parts = schema.keys(), [(name, _reader(hint)) for name, hint in schema.items()]

    def read(value: Any) -> Any:
        if type(value) is not dict:
            _refuse(cls, value)
        if value.keys() != names:
            missing, unknown = names - value.keys(), value.keys() - names
            raise _Mismatch(f"missing fields {sorted(missing)}, unknown {sorted(unknown)}")
        try:
            return cls(*[convert(value[name]) for name, convert in parts])
        except _Mismatch as mismatch:
            wrong = next(name for name, convert in parts if _fails(convert, value[name]))
            raise mismatch.under(f".{wrong}") from None

    return read


def _tuple_reader(expected: Any, read_item: Convert) -> Convert:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            _refuse(expected, value)
        try:
            return tuple([read_item(item) for item in value])
        except _Mismatch as mismatch:
            wrong = next(i for i, item in enumerate(value) if _fails(read_item, item))
            raise mismatch.under(f"[{wrong}]") from None

    return read


def _dict_reader(expected: Any, read_item: Convert) -> Convert:
    read_key = _reader(str)

    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            _refuse(expected, value)
        given = {}
        for key, item in value.items():
            try:
                given[read_key(key)] = read_item(item)
            except _Mismatch as mismatch:
                raise mismatch.under(f"[{key!r}]") from None
        return given

    return read


def _fails(convert: Convert, value: Any) -> bool:
    try:
        convert(value)
    except _Mismatch:
        return True
    return False


@cache
def _schema(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _inner(parts: tuple[Any, ...]) -> Any:
    inner = [part for part in parts if part is not types.NoneType]
    assert len(inner) == 1, f"only X | None unions are supported, got {parts}"
    return inner[0]
