"""A tokeniser that takes virtual time, of its thread alone or of its whole process.

Library calls that keep the interpreter lock block the process that makes them.
"""

import time
from contextvars import Context
from pathlib import Path
from typing import Any

from tandem.text.tokenizer import Tokenizer
from tests.sim.loop import here

CHAR_S = 0.002
"""Seconds per character; texts in simulations are short."""
LONG_CHARS, MAX_CHARS = 150, 6000
"""Bounds of cluster/gateway/tokenising.py, scaled down."""


class SlowLibrary:
    """Wraps ``tokenizers.Tokenizer``, which does the work."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        """Encode texts; other threads of the process keep running."""
        time.sleep(CHAR_S * sum(map(len, texts)))  # time: virtual
        return self._library.encode_batch_fast(texts, **options)

    def encode(self, text: str, **options: Any) -> Any:
        """Encode a text; the whole process is blocked."""
        seconds, process = CHAR_S * len(text), here()
        process.runs = False
        process.loop.call_later(seconds, process.resume, context=Context())
        time.sleep(seconds)  # time: virtual
        return self._library.encode(text, **options)


def slow_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder, which takes virtual time."""
    made = Tokenizer(folder)
    made._tokenizer = SlowLibrary(made._tokenizer)  # type: ignore[assignment]
    return made
