"""Asyncio tasks that may outlive their caller but not their owner, and helpers for threads."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from tandem.core.errors import TandemError

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Tasks:
    """Set of running asyncio tasks.

    It refers to each task until the task ends, so that none is garbage collected before.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def run_detached(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await ``work``. If the caller is cancelled, ``work`` continues to its end."""
        return await asyncio.shield(self.start(work))

    async def finish(self) -> None:
        """Wait until all tasks have ended, whatever their results."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, TandemError):
            # A caller that awaits the task gets the error too. Otherwise this is its only trace.
            log.info("background task %s failed: %s", _name(task.get_coro()), error)
        elif error is not None:
            log.error("background task %s failed", _name(task.get_coro()), exc_info=error)


def _name(work: object) -> str:
    """Return the name of a function or coroutine for the log."""
    return str(getattr(work, "__qualname__", work))


async def run_periodically(every_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` every ``every_s`` seconds until cancelled. Errors are logged."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except Exception:
            log.exception("%s failed; it runs again in %s s", _name(work), every_s)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait until they have ended, whatever their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def poll_until(condition: Callable[[], Result], within_s: float, every_s: float) -> Result:
    """Poll ``condition`` every ``every_s`` seconds and return its last value.

    Returns when the value is truthy or ``within_s`` seconds have passed.
    """
    ends_at = asyncio.get_running_loop().time() + within_s
    while not (found := condition()) and asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(every_s)
    return found


def resolve(future: "asyncio.Future[Result]", result: Result | Exception) -> None:
    """Set the result or error of ``future``, unless it is already done."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Run a long blocking function on a new thread, so that it occupies no shared executor."""
    return await asyncio.wrap_future(start_in_thread(function))


def start_in_thread(function: Callable[[], Result]) -> "Future[Result]":
    """Run ``function`` on a new thread; return a future that waiters cannot cancel."""
    future: Future[Result] = uncancellable_future()
    threading.Thread(
        target=resolve_by_calling, args=(future, function), name="blocking", daemon=True
    ).start()
    return future


def uncancellable_future() -> "Future[Any]":
    """Return a future that waiters cannot cancel. Only its creator may resolve it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve_by_calling(future: "Future[Result]", function: Callable[[], Result]) -> None:
    """Resolve ``future`` with the result or error of ``function``."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
