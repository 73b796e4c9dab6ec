"""How long Triton has compiled in this process: a kernel is compiled in the first step that meets
it, seconds each, and whoever does that is not stuck."""

import time
from typing import Any

import triton

LONGEST_S = 120.0
"""Of one kernel, whatever becomes of it."""


class Compiling:
    """``begin`` and ``end`` are called by whoever compiles, one at a time; ``seconds`` by any."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._began_at: float | None = None

    def begin(self, **_: Any) -> None:
        # One that failed has not ended.
        self._ended_s, self._began_at = self.seconds(), time.monotonic()

    def end(self, **_: Any) -> None:
        self._ended_s, self._began_at = self.seconds(), None

    def seconds(self) -> float:
        ended_s, began_at = self._ended_s, self._began_at
        if began_at is None:
            return ended_s
        return ended_s + min(time.monotonic() - began_at, LONGEST_S)


_HERE = Compiling()
seconds = _HERE.seconds
triton.knobs.runtime.jit_cache_hook = _HERE.begin
triton.knobs.runtime.jit_post_compile_hook = _HERE.end
