"""How a request is refused: by field, value and remedy."""

from typing import Any, NoReturn

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def refuse(field: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{field}={value!r}: {remedy}")


def refuse_unknown(message: Message, prefix: str) -> None:
    """Raises ``ValueError`` if ``message`` has fields that this server does not know."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = f"{prefix}field number {unknown[0].field_number}"
        raise ValueError(f"{name} is unknown to this server; leave it out or update the server")
