"""The JSON files beside a checkpoint."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty if there is no such file.

    Raises ValueError naming the file when it cannot be read or does not hold one JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:  # JSON and UTF-8 errors both
        raise ValueError(f"{file}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds {type(content).__name__}, expected an object")
    return content
