"""Parameters of tests of which some run in ``make test`` and all run in ``make soak``."""

from collections.abc import Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Return ``values`` as parameters, of which those that ``kept`` lacks are marked slow."""
    chosen = list(kept)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.slow,
        )
        for value in values
    ]
