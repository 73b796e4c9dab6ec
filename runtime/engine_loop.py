"""The engine thread, which owns a rank's tensors, and the queue through which others reach it.

Only this thread touches page tables and row state. Other threads post a function to the queue and
await its result. No lock is therefore needed for tensor state.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from tandem.core.config import ControlConfig
from tandem.core.errors import CaptureError, EpochEnded, RankLost
from tandem.core.tasks import resolve_by_calling
from tandem.runtime.crash_journal import CrashJournal
from tandem.runtime.stall_detector import StallDetector

MAX_FAILED_STEPS = 4
"""Maximum number of consecutive failed steps. After one more, the engine counts as broken and its
loop ends."""
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class SteppableEngine(Protocol):
    """Interface of an engine that an EngineLoop runs."""

    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def fail(self, error: Exception) -> None:
        """Handle the ``error`` of a step: end the step's sequences and prepare for another step."""

    def close(self) -> None:
        """Release compiled programs. Called after the last step."""


class EngineLoop:
    """Runs posted functions and the steps of its engines on one thread.

    If a step raises, its engine normally ends the sequences of that step, and the loop continues.
    The loop ends if the error leaves the state in doubt (``is_fatal``), if the gang's epoch is
    over, or after too many failed steps. ``failure`` then holds the error, later posts fail with
    RankLost, and each ``on_failure`` callback is called once, on the engine thread. If a posted
    function raises, only its own future fails.

    ``stall_detector`` measures the progress of the thread. Engines record the sequences of their
    steps in ``crash_journal``.
    """

    def __init__(
        self,
        name: str,
        crash_journal: CrashJournal | None = None,
        stuck_s: float = ControlConfig().stall_timeout_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stall_detector = StallDetector(stuck_s, clock)
        self.crash_journal = crash_journal or CrashJournal()
        self._num_failed = 0
        self.failure: BaseException | None = None
        self._engines: list[SteppableEngine] = []
        self._on_failure: list[Callable[[BaseException], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._posts: deque[tuple[Callable[[], object], Future]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, engine: SteppableEngine) -> None:
        self._engines.append(engine)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        self._on_failure.append(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end of the engine thread, after its engines have closed."""
        self._on_end.append(callback)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_engines(self) -> bool:
        """Whether at least one engine has not been closed yet."""
        return bool(self._engines)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Run the functions posted so far, then end the thread.

        Waits for the end for at most ``timeout_s``, unless called on that thread.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def post(self, function: Callable[[], Result]) -> "Future[Result]":
        """Queue ``function`` for the engine thread, which runs it between two steps.

        May be called on any thread.
        """
        future: Future[Result] = Future()
        with self._wake:
            if self._stopping or self.failure is not None:
                future.set_exception(RankLost(f"the engine loop has ended: {self.failure!r}"))
                return future
            self._posts.append((function, future))
            self._wake.notify()
        return future

    def wake(self) -> None:
        """Wake the engine thread because an engine may have work. May be called on any thread."""
        with self._wake:
            self._wake.notify()

    def fail(self, error: Exception) -> None:
        """End the loop because of ``error``, a permanent failure outside of steps.

        May be called on any thread.
        """
        self.failure = error
        self.stop(0.0)

    async def call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self.post(function))

    def _run(self) -> None:
        self.stall_detector.attach_to_thread()
        try:
            while self._wait():
                self.stall_detector.start_turn()
                self._run_posts()
                for engine in self._engines:
                    if engine.has_work():
                        self._step(engine)
                self.stall_detector.end_turn()
        except BaseException as error:
            if isinstance(error, EpochEnded) and error.__cause__ is None:
                log.warning("the engine has stopped: %s", error)
            else:
                log.exception("the engine has stopped")
            with self._wake:  # refuse later posts; earlier ones still run below
                self.failure = error
            for callback in self._on_failure:
                callback(error)
        finally:
            while self._engines:
                self._end(self._engines.pop().close)
            for end in self._on_end:
                self._end(end)
            self._run_posts()

    def _end(self, end: Callable[[], None]) -> None:
        """Call the cleanup function ``end``. Log its error, so that other cleanup still runs."""
        try:
            end()
        except Exception:
            log.exception("a cleanup function of the engine loop failed")

    def _step(self, engine: SteppableEngine) -> None:
        try:
            engine.step()
            self._num_failed = 0
        except Exception as error:
            self._num_failed += 1
            is_over = isinstance(error, EpochEnded) or is_fatal(error)
            if is_over or self._num_failed > MAX_FAILED_STEPS:
                raise
            log.exception("a step failed; failing all of its sequences")
            engine.fail(error)

    def _wait(self) -> bool:
        with self._wake:
            while not (self._posts or self._stopping or any(e.has_work() for e in self._engines)):
                self._wake.wait()
            if self.failure is not None:
                self.crash_journal.close()  # no sequence caused a failure outside of steps
                raise self.failure
            return not self._stopping

    def _run_posts(self) -> None:
        while self._posts:
            function, future = self._posts.popleft()
            if future.set_running_or_notify_cancel():
                resolve_by_calling(future, function)


def is_fatal(error: Exception) -> bool:
    """Return whether ``error`` leaves the state in doubt: a broken invariant or a lost device.

    Running out of memory and invalid input are not fatal.
    """
    return isinstance(error, AssertionError) or is_device_lost(error)


def is_device_lost(error: Exception) -> bool:
    """Return whether ``error`` means that the device no longer responds.

    A CaptureError does not mean that, although its text also contains "CUDA error".
    """
    return "CUDA error" in str(error) and not isinstance(error, CaptureError)
