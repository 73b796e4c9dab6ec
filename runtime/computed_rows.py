"""Counts of the token rows that a rank's experts have computed, reported in its heartbeats."""

import time

from tandem.model.network.dispatch.base import Dispatch
from tandem.runtime.engine_loop import EngineLoop

ROWS_S = 1.0
"""Minimum seconds between two readings of the row counts. Each reading makes the engine thread wait
for the device."""


class ComputedRows:
    """Caches the row counts of a rank's experts, which are read on the engine thread.

    However many heartbeats arrive, at most one reading is posted to the engine thread at a time.
    The next one follows after at least ROWS_S.
    """

    def __init__(self, loop: EngineLoop, dispatch: Dispatch) -> None:
        self._loop = loop
        self._dispatch = dispatch
        self._latest: tuple[int, ...] = ()
        self._next_at = 0.0

    def latest(self) -> tuple[int, ...]:
        """Return the latest row counts, one per MoE layer, without waiting for a new reading.

        Returns () if there was no reading yet, or if the rank holds all experts itself.
        """
        if self._dispatch.placement is not None and time.monotonic() >= self._next_at:
            self._next_at = float("inf")
            self._loop.post(self._read)
        return self._latest

    def _read(self) -> None:
        try:
            self._latest = tuple(self._dispatch.num_computed_rows())
        finally:
            self._next_at = time.monotonic() + ROWS_S
