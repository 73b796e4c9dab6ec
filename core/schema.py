"""msgpack messages with validated schemas, and errors that travel as messages.

A message is a frozen dataclass, sent as ``[class name, {field: value}]``. The name lets a receiver
report a message of the wrong class. pydantic checks received fields. Types must match exactly (no
"1" for 1) and unknown fields are errors. Only bytes cross Ray and sockets, never pickled objects.
"""

import reprlib
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaSerializer, SchemaValidator

from tandem.core import errors

Message = TypeVar("Message")
_STRICT_TYPES = {"int", "float", "bool", "str", "bytes"}


class WireError(ValueError):
    """Error for a message that does not match its schema; names the expected and actual values."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a message.

    Attributes:
        kind: Name of a class in core/errors.py, or ValueError. Any other name decodes to
            TandemError.
        text: Message of the error.
        retry_after_s: Seconds to wait before a retry. Only Overloaded uses it.
    """

    kind: str
    text: str
    retry_after_s: float = 0.0


def pack(message: Any) -> bytes:
    """Encode a message dataclass. Field values are not validated, because this process set them."""
    cls: Any = type(message)
    return msgpack.packb([cls.__name__, _schema(cls)[0].to_python(message)])


def unpack(cls: type[Message], data: bytes) -> Message:
    """Decode ``data`` as ``cls``. Raises WireError if ``data`` is anything else."""
    return _validate(cls, *_name_and_fields(cls, data))


def decode(cls: type[Message], data: bytes) -> Message:
    """Decode ``data`` as ``cls``. If it holds a Failure instead, raise the error it describes."""
    name, fields = _name_and_fields(cls, data)
    if name == Failure.__name__:
        raise to_error(_validate(Failure, name, fields))
    return _validate(cls, name, fields)


def to_failure(error: BaseException) -> Failure:
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return Failure(kind, str(error), getattr(error, "retry_after_s", 0.0))


def encode_failure(error: BaseException) -> bytes:
    return pack(to_failure(error))


def to_error(failure: Failure) -> Exception:
    if failure.kind == "ValueError":
        return ValueError(failure.text)
    if failure.kind == "Overloaded":
        return errors.Overloaded(failure.text, failure.retry_after_s)
    known = getattr(errors, failure.kind, None)
    if isinstance(known, type) and issubclass(known, errors.TandemError):
        return known(failure.text)
    return errors.TandemError(f"{failure.kind}: {failure.text}")


class _ShortRepr(reprlib.Repr):
    """Truncated repr of a value, at a cost that does not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = 80
        self.maxother = 80

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[: self.maxstring])


short_repr = _ShortRepr().repr


def _name_and_fields(cls: type, data: bytes) -> tuple[str, Any]:
    try:
        body = msgpack.unpackb(data)
    except Exception as error:
        raise WireError(f"expected {cls.__name__}, got bytes that are not msgpack") from error
    if not (isinstance(body, list) and len(body) == 2 and isinstance(body[0], str)):
        raise WireError(f"expected {cls.__name__} as [name, fields], got {short_repr(body)}")
    return body[0], body[1]


def _validate(cls: Any, name: str, fields: Any) -> Any:
    if name != cls.__name__:
        raise WireError(f"expected message {cls.__name__}, got {short_repr(name)}")
    try:
        return _schema(cls)[1].validate_python(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = ".".join(map(str, (cls.__name__, *problem["loc"])))
        received = f"{type(problem['input']).__name__} {short_repr(problem['input'])}"
        raise WireError(f"{path}: {problem['msg']}, got {received}") from None


@cache
def _schema(cls: Any) -> tuple[SchemaSerializer, SchemaValidator]:
    schema: Any = _make_strict(TypeAdapter(cls).core_schema)
    return SchemaSerializer(schema), SchemaValidator(schema)


def _make_strict(node: Any) -> Any:
    """Return the pydantic schema ``node`` with strict scalar types and without unknown fields.

    Tuples stay lenient, because msgpack decodes them as lists.
    """
    if isinstance(node, list):
        return [_make_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: _make_strict(value) for key, value in node.items()}
    if schema.get("type") in _STRICT_TYPES:
        schema["strict"] = True
    if schema.get("type") == "dataclass-args":
        schema["extra_behavior"] = "forbid"
    return schema
