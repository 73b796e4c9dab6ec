"""Rows that the experts of a rank have computed, for its heartbeats."""

import time

from tandem.model.network.dispatch.base import Dispatch
from tandem.runtime.engine_loop import EngineLoop

ROWS_S = 1.0
"""Minimum time between two readings of the counts, for which the engine thread waits for the
device."""


class ComputedRows:
    """The counts as the engine thread last read them.

    However many heartbeats are sent, one reading at a time is posted to the engine thread, and the
    next one ROWS_S after it.
    """

    def __init__(self, loop: EngineLoop, dispatch: Dispatch) -> None:
        self._loop, self._dispatch = loop, dispatch
        self._latest: tuple[int, ...] = ()
        self._next_at = 0.0

    def latest(self) -> tuple[int, ...]:
        """Return rows by MoE layer without waiting, () for a rank that holds all experts itself."""
        if self._dispatch.placement is not None and time.monotonic() >= self._next_at:
            self._next_at = float("inf")
            self._loop.post(self._read)
        return self._latest

    def _read(self) -> None:
        try:
            self._latest = tuple(self._dispatch.num_computed_rows())
        finally:
            self._next_at = time.monotonic() + ROWS_S
