"""Results as JSON lines, one file for all sections."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = "TANDEM_GPU_OUT"


class Say:
    """Writes each measurement of a section as soon as it is known.

    ``wrong`` collects the lines with ``is_right=False``.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        self.wrong: list[str] = []

    def __call__(self, what: str, **values: Any) -> None:
        line = {"section": self._section, "what": what, **values}
        if not values.get("is_right", True):
            self.wrong.append(what)
        with results_file().open("a") as file:
            file.write(json.dumps(line) + "\n")
        told = ", ".join(f"{name} {_short(value)}" for name, value in values.items())
        print(f"{self._section}: {what}: {told}", flush=True)


def results_file() -> Path:
    return Path(os.environ.get(OUT, "build/gpu")) / "results.jsonl"


def lines() -> Iterator[dict[str, Any]]:
    if results_file().exists():
        yield from map(json.loads, results_file().read_text().splitlines())


def earlier(section: str, what: str) -> dict[str, Any]:
    """Return the latest line of that name. Raises ValueError if there is none."""
    found = [one for one in lines() if (one["section"], one["what"]) == (section, what)]
    if not found:
        raise ValueError(f"{results_file()} has no {what!r} of {section}: run that section first")
    return found[-1]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
