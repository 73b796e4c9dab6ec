"""Test parameters of which some run in ``make test`` and all run in ``make soak``."""

from collections.abc import Iterable
from typing import Any

import pytest


def often(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Return ``values`` as parameters, marking those that are not in ``kept`` as slow."""
    chosen = list(kept)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in chosen else pytest.mark.slow,
        )
        for value in values
    ]
