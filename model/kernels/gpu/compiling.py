"""How long Triton has compiled in this process: a kernel is compiled in the first step that meets
it, seconds each, and whoever does that is not stuck."""

import time
from typing import Any

import triton

MAX_KERNEL_COMPILE_S = 120.0
"""Of one kernel, whatever becomes of it."""


class CompileTimer:
    """``begin`` and ``end`` are called by whoever compiles, one at a time; ``seconds`` by any."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._started_at: float | None = None

    def start(self, **_: Any) -> None:
        # One that failed has not ended.
        self._ended_s, self._started_at = self.seconds(), time.monotonic()

    def stop(self, **_: Any) -> None:
        self._ended_s, self._started_at = self.seconds(), None

    def seconds(self) -> float:
        ended_s, started_at = self._ended_s, self._started_at
        if started_at is None:
            return ended_s
        return ended_s + min(time.monotonic() - started_at, MAX_KERNEL_COMPILE_S)


_TIMER = CompileTimer()
seconds = _TIMER.seconds
triton.knobs.runtime.jit_cache_hook = _TIMER.start
triton.knobs.runtime.jit_post_compile_hook = _TIMER.stop
