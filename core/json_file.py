"""JSON files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``, or an empty one if there is no such file.

    Raises ValueError naming the file if it cannot be read or does not hold one JSON object. Two
    different values for one key of an object are an error too.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: is not JSON ({error}); download it again") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a JSON {type(content).__name__}, expected an object")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises ValueError for a key with two different values."""
    found = dict(pairs)
    for key, value in pairs if len(found) < len(pairs) else ():
        if found[key] != value:
            raise ValueError(
                f"{key} occurs twice, as {value!r:.80} and {found[key]!r:.80}; keep one of them"
            )
    return found
