"""Reading one field of a JSON object, with an error that names file, field, value and remedy."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ABSENT = object()


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`.

    Raises:
        ValueError: there is no such file, or it does not hold one JSON object.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; is this the folder of a checkpoint?") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:  # JSON and UTF-8 errors both
        raise ValueError(f"{file}: not valid JSON ({error}); copy the file again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds a {type(raw).__name__}; it must be one JSON object")
    return raw


class Fields:
    """The fields of one JSON object; `origin` is the file named in errors.

    A null counts as absent: checkpoints write both. Every getter raises ValueError for a value of
    the wrong kind, and for an absent one unless there is a default.
    """

    def __init__(self, raw: Mapping[str, Any], origin: str) -> None:
        self.raw = raw
        self.origin = origin

    def error(self, name: str, remedy: str, value: object = _ABSENT) -> ValueError:
        """The error for field `name`, to be raised; `value` if it is not simply the field's."""
        shown = self.raw.get(name) if value is _ABSENT else value
        return ValueError(f"{self.origin}: {name} = {shown!r}: {remedy}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < minimum:
            raise self.error(name, f"must be a whole number >= {minimum}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """The field, whose null means something; only its absence is an error."""
        if name not in self.raw:
            raise self._missing(name)
        return None if self.raw[name] is None else self.integer(name, minimum=0)

    def number(
        self, name: str, default: float | None = None, minimum: float | None = None
    ) -> float:
        """A finite number above 0, or at least `minimum` where one is given."""
        value = self._value(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.error(name, "must be a finite number")
        if value < minimum if minimum is not None else value <= 0:
            raise self.error(
                name, f"must be >= {minimum}" if minimum is not None else "must be > 0"
            )
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """The object in field `name`; empty when absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self._value(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise self.error(name, "must be a token id >= 0, or a list of them")
        return tuple(ids)

    def token_id(self, name: str) -> int | None:
        """One token id; None when absent."""
        ids = self.token_ids(name)
        if len(ids) > 1:
            raise self.error(name, "must be one token id")
        return ids[0] if ids else None

    def _value(self, name: str, default: object) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise self._missing(name)
        return default

    def _missing(self, name: str) -> ValueError:
        return ValueError(f"{self.origin}: {name} is missing; take config.json from the checkpoint")
