"""Measures the turns of an engine thread, to distinguish slow turns from stalled ones.

A turn is one iteration of the engine loop (engine_loop.py).
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from tandem.core.progress import EngineProgress, LockstepPosition, compute_stall_threshold_s

MAX_MEASURE_GAP_S = 1.5
"""Maximum seconds by which the age of a turn grows between two measurements.

Measurements are one second apart. A longer interval means that the whole process was suspended,
which does not make the turn stalled.
"""
NUM_RECENT_TURNS = 256


class StallDetector:
    """Measures how long the turns of an engine thread take.

    The engine thread calls ``attach_to_thread``, ``start_turn`` and ``end_turn``. One other thread
    calls ``measure_progress``. A turn does not age while its thread waits for a CPU, because a
    starved thread is not stalled. Neither does it age while ``clock`` stands still.
    """

    def __init__(self, min_threshold_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_threshold_s = min_threshold_s
        self.clock = clock
        self._starved_s: Callable[[], float] = lambda: 0.0
        self._starved_before_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_TURNS)
        self._num_turns = 0
        self._turn_started_at: float | None = None
        self._measured_at = clock()
        self._last_measured = (-1, 0.0)
        """Number of the turn that was in progress at the last measurement, and its age in seconds
        then."""
        self.position: Callable[[], LockstepPosition] = LockstepPosition

    def attach_to_thread(self, starved_s: Callable[[], float] | None = None) -> None:
        """Measure the calling thread from now on.

        ``starved_s`` returns the total seconds that the thread has waited for a CPU. Default: as
        the kernel reports them.
        """
        thread_id = threading.get_native_id()
        self._starved_s = starved_s or (lambda: read_cpu_wait_s(thread_id))
        self._starved_before_s = self._starved_s()

    def start_turn(self) -> None:
        self._turn_started_at = self.clock()

    def end_turn(self) -> None:
        assert self._turn_started_at is not None, "end_turn() was called without start_turn()"
        turn, age_s = self._last_measured
        unseen_s = MAX_MEASURE_GAP_S + (age_s if turn == self._num_turns else 0.0)
        self._recent_s.append(min(self.clock() - self._turn_started_at, unseen_s))
        self._turn_started_at = None
        self._num_turns += 1

    def measure_progress(self) -> EngineProgress:
        now = self.clock()
        began_at = self._turn_started_at
        turn = self._num_turns
        starved_s = self._starved_s()
        gap_s = min(now - self._measured_at, MAX_MEASURE_GAP_S) - (
            starved_s - self._starved_before_s
        )
        self._measured_at = now
        self._starved_before_s = starved_s
        age_s = 0.0
        if began_at is not None:
            before_s = self._last_measured[1] if self._last_measured[0] == turn else 0.0
            age_s = min(before_s + max(0.0, gap_s), now - began_at)
            self._last_measured = (turn, age_s)
        return EngineProgress(
            num_turns=turn,
            busy_s=age_s,
            stall_threshold_s=self.stall_threshold_s,
            position=self.position(),
        )

    @property
    def stall_threshold_s(self) -> float:
        """Age in seconds above which a turn counts as stalled. May be read on any thread."""
        return compute_stall_threshold_s(tuple(self._recent_s), self._min_threshold_s)


def read_cpu_wait_s(thread_id: int) -> float:
    """Return the seconds for which a thread of this process was ready to run but had no CPU.

    Returns 0 if the kernel does not report them.
    """
    try:
        with open(f"/proc/self/task/{thread_id}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
