"""Threads in virtual time: greenlets that switch only where they block.

``patched`` replaces the standard library's threads. Condition, Event, Semaphore, Future and
ThreadPoolExecutor are the library's classes on top of these locks.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from greenlet import GreenletExit, getcurrent, greenlet

from tests.sim.loop import SimLoop


class Threads:
    """All threads of one loop. The greenlet that creates this object is the loop's."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop, self.main = loop, getcurrent()
        self.by_greenlet: dict[greenlet, Any] = {}
        self.is_over = False
        self._loops = SimpleNamespace(name="loop", ident=0)
        made = self

        class Thread(SimThread):
            threads = made

        class Timer(Thread):
            """Calls a function after an interval, unless it is cancelled."""

            def __init__(
                self,
                interval: float,
                function: Callable[..., Any],
                args: Any = (),
                kwargs: Any = None,
            ) -> None:
                super().__init__(target=self._fire)
                self._interval, self._function, self._args_ = interval, function, args
                self._is_cancelled = False

            def start(self) -> None:
                """Start without a greenlet: a waiting timer holds nothing."""
                made.loop.call_later(self._interval, self._fire)

            def cancel(self) -> None:
                self._is_cancelled = True

            def _fire(self) -> None:
                if not self._is_cancelled:
                    self._function(*self._args_)

        class Lock(SimLock):
            threads = made

        class RLock(SimRLock):
            threads = made

        self.Thread, self.Timer, self.Lock, self.RLock = Thread, Timer, Lock, RLock

    def end(self) -> None:
        """End all waits. The remaining threads unwind, and their errors are ignored."""
        self.is_over = True
        logging.disable()
        for one in [*self.by_greenlet]:
            with suppress(BaseException):
                one.throw(GreenletExit)
        logging.disable(logging.NOTSET)

    def current(self) -> Any:
        return self.by_greenlet.get(getcurrent(), self._loops)

    def sleep(self, seconds: float) -> None:
        Waiter(self).park(seconds)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the standard library's threads and clocks during the block."""
        changes: list[tuple[Any, str, Any]] = [
            (threading, "Thread", self.Thread),
            (threading, "Timer", self.Timer),
            (threading, "Lock", self.Lock),
            (threading, "_allocate_lock", self.Lock),
            (threading, "RLock", self.RLock),
            (threading, "_time", self.loop.time),
            (threading, "current_thread", self.current),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
            (time, "monotonic", self.loop.time),
            (time, "perf_counter", self.loop.time),
            (time, "sleep", self.sleep),
        ]
        with ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(patch.object(owner, name, value))
            yield


class Waiter:
    """A place where a greenlet waits once, until it is woken or times out."""

    def __init__(self, threads: Threads) -> None:
        self._threads, self._greenlet, self._context = threads, getcurrent(), copy_context()
        self._is_over = self._is_woken = False
        if threads.is_over:
            raise GreenletExit
        assert self._greenlet is not threads.main, "a task blocks its loop"

    def park(self, timeout_s: float | None) -> bool:
        """Wait; return whether it was woken."""
        loop = self._threads.loop
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._end, False)
        self._threads.main.switch()
        if timer is not None:
            timer.cancel()
        return self._is_woken

    def wake(self) -> bool:
        """Wake it, from any greenlet; return False if it had timed out already."""
        if self._is_over:
            return False
        self._is_over = self._is_woken = True
        self._threads.loop.call_soon(self._greenlet.switch, context=self._context)
        return True

    def _end(self, is_woken: bool) -> None:
        if not self._is_over:
            self._is_over, self._is_woken = True, is_woken
            self._greenlet.switch()


class SimThread:
    threads: Threads

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon, self.ident = name or "thread", daemon, None
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._is_over = False
        self._joining: list[Waiter] = []

    def start(self) -> None:
        threads, context = self.threads, copy_context()
        made = greenlet(self._run, parent=threads.main)
        made.gr_context = context
        self.ident = id(self)  # type: ignore[assignment]
        threads.by_greenlet[made] = self
        threads.loop.call_soon(made.switch, context=context.copy())

    def _run(self) -> None:
        try:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)
        except Exception as error:
            told = {"message": f"thread {self.name}", "exception": error}
            self.threads.loop.call_exception_handler(told)
        finally:
            self._is_over = True
            del self.threads.by_greenlet[getcurrent()]
            for waiter in self._joining:
                waiter.wake()

    def is_alive(self) -> bool:
        return self.ident is not None and not self._is_over

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and timeout != 0.0 and getcurrent() is not self.threads.main:
            waiter = Waiter(self.threads)
            self._joining.append(waiter)
            waiter.park(timeout)


class SimLock:
    """Replaces threading.Lock. A holder may block, but an asyncio task that then wants the lock is
    an error."""

    threads: Threads

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._is_held:
            self._is_held = True
            return True
        if not blocking or timeout == 0:
            return False
        waiter = Waiter(self.threads)
        self._waiting.append(waiter)
        return waiter.park(None if timeout < 0 else timeout)

    def release(self) -> None:
        """Release the lock to the first waiter, which owns it at once."""
        while self._waiting:
            if self._waiting.popleft().wake():
                return
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimRLock:
    """Replaces threading.RLock, also inside Condition."""

    threads: Threads

    def __init__(self) -> None:
        self._lock = self.threads.Lock()
        self._owner: Any = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is getcurrent():
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = getcurrent(), 1
        return True

    def release(self) -> None:
        assert self._owner is getcurrent(), "it is somebody else's"
        self._count -= 1
        if self._count == 0:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._owner is getcurrent()

    def _release_save(self) -> int:
        count, self._owner, self._count = self._count, None, 0
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = getcurrent(), count
