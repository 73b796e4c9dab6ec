"""Time that Triton has spent compiling in this process.

A kernel is compiled in the first step that uses it, which takes seconds. The stall detection must
not count this time.
"""

import time
from typing import Any

import triton

MAX_KERNEL_COMPILE_S = 120.0
"""Maximum seconds that are counted for one kernel, even if its compilation never ends."""


class CompileTimer:
    """Accumulates compilation time.

    The compiling thread calls ``start`` and ``stop``, for one kernel at a time. Any thread may call
    ``seconds``.
    """

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._started_at: float | None = None

    def start(self, **_: Any) -> None:
        # A compilation that failed never called stop.
        self._ended_s = self.seconds()
        self._started_at = time.monotonic()

    def stop(self, **_: Any) -> None:
        self._ended_s = self.seconds()
        self._started_at = None

    def seconds(self) -> float:
        ended_s = self._ended_s
        started_at = self._started_at
        if started_at is None:
            return ended_s
        return ended_s + min(time.monotonic() - started_at, MAX_KERNEL_COMPILE_S)


_TIMER = CompileTimer()
seconds = _TIMER.seconds
triton.knobs.runtime.jit_cache_hook = _TIMER.start
triton.knobs.runtime.jit_post_compile_hook = _TIMER.stop
