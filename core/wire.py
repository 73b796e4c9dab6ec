"""msgpack messages with checked schemas.

A message is a frozen dataclass. On the wire it is ``[class name, {field: value}]``, so a
reader can name what it got. Supported field types: int, float, bool, str, bytes, other
messages, ``tuple[X, ...]``, ``dict[str, X]`` and ``X | None``.
"""

import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

Message = TypeVar("Message")


class WireError(ValueError):
    """A message that does not match its schema; the text gives both sides' values."""


def pack(message: Any) -> bytes:
    """Encode a message dataclass; its own field values are trusted (they are ours)."""
    return msgpack.packb([type(message).__name__, _to_plain(message)])


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
    return _from_plain(cls, body[1], cls.__name__)


def _to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value


@cache
def _schema(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _from_plain(expected: Any, value: Any, where: str) -> Any:
    if is_dataclass(expected):
        return _message_from_plain(expected, value, where)  # type: ignore[arg-type]
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _optional_from_plain(expected, value, where)
    if origin is tuple:
        _check(isinstance(value, list), expected, value, where)
        item_type = get_args(expected)[0]
        return tuple(_from_plain(item_type, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        _check(isinstance(value, dict), expected, value, where)
        item_type = get_args(expected)[1]
        return {_from_plain(str, k, where): _from_plain(item_type, v, f"{where}[{k!r}]")
                for k, v in value.items()}  # fmt: skip
    if expected is float and type(value) is int:
        return float(value)
    _check(type(value) is expected, expected, value, where)
    return value


def _message_from_plain(cls: type, value: Any, where: str) -> Any:
    _check(isinstance(value, dict), cls, value, where)
    schema = _schema(cls)
    if value.keys() != schema.keys():
        missing, unknown = schema.keys() - value.keys(), value.keys() - schema.keys()
        raise WireError(f"{where}: missing fields {sorted(missing)}, unknown {sorted(unknown)}")
    return cls(**{n: _from_plain(t, value[n], f"{where}.{n}") for n, t in schema.items()})


def _optional_from_plain(expected: Any, value: Any, where: str) -> Any:
    inner = [arg for arg in get_args(expected) if arg is not types.NoneType]
    assert len(inner) == 1, f"{where}: only X | None unions are supported"
    return None if value is None else _from_plain(inner[0], value, where)


def _check(good: bool, expected: Any, value: Any, where: str) -> None:
    if not good:
        name = getattr(expected, "__name__", str(expected))
        raise WireError(f"{where}: expected {name}, got {type(value).__name__} {value!r:.80}")
