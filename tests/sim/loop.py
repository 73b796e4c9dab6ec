"""An event loop whose clock jumps to the next event, and the simulated processes that run on it.

All code belongs to the process of its context. A killed process never runs again, not even its
``finally`` blocks. A stopped one resumes where it was when it is continued.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from typing import Any

BEGIN_S = 1_000.0
MOST_TURNS = 20_000
"""Maximum number of turns of the loop without any progress of time."""
PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)


class Deadlock(Exception):
    """No event is left that could ever happen."""


class Process:
    """A process on a simulated machine, which runs code in its ``context``.

    When it is killed its kernel runs ``closes``, unless the machine was lost. Then ``on_death``
    notifies Ray.
    """

    def __init__(self, loop: "SimLoop", name: str, machine: str = "") -> None:
        self.loop, self.name, self.machine = loop, name, machine
        self.is_alive, self.is_stopped, self.runs = True, False, True
        self.is_gone = False
        self.closes: list[Callable[[], None]] = []
        self.on_death: list[Callable[[], None]] = []
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self.held: list[asyncio.Handle] = []
        self.tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Any) -> "asyncio.Task[Any]":
        return self.loop.create_task(work, context=self.context.copy())

    def call(self, function: Callable[..., Any], *given: Any, after_s: float = 0.0) -> None:
        """Call a function in this process later, unless it is dead by then."""
        self.loop.call_later(after_s, function, *given, context=self.context)

    def kill(self, is_gone: bool = False) -> None:
        """Kill the process. If its machine ``is_gone``, no peer is notified."""
        if self.is_alive:
            self.is_alive = self.runs = False
            self.is_gone = is_gone
            self.loop.graveyard.append(self)
            for told in [*([] if is_gone else self.closes), *self.on_death]:
                told()

    def stop(self) -> None:
        self.is_stopped, self.runs = True, False

    def resume(self) -> None:
        self.is_stopped, self.runs = False, self.is_alive
        self.loop.requeue(self.held)
        self.held = []


def here() -> Process:
    """Return the process that the running code belongs to."""
    process = PROCESS.get()
    assert process is not None, "nobody's code asks for its process"
    return process


class _Handle(asyncio.Handle):
    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    __slots__ = ()


class SimLoop(asyncio.BaseEventLoop):
    """``threads`` runs blocking code and ``net`` makes connections; both are set after
    construction.

    ``graveyard`` keeps references to everything killed. Otherwise garbage collection would run its
    ``finally`` blocks.
    """

    threads: Any
    net: Any

    def __init__(self) -> None:
        super().__init__()
        self._now, self._num_timers, self._num_turns = BEGIN_S, 0, 0
        self._due: list[tuple[float, int, _Timer]] = []
        """Timers by time. Of two with the same time, the one made first comes first."""
        self.graveyard: list[Any] = []
        self.set_task_factory(self._task)

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Run everything that is ready, or else advance the time to the next timer."""
        ready = self._ready  # type: ignore[attr-defined]
        if ready:
            self._num_turns += 1
            if self._num_turns > MOST_TURNS:
                raise Deadlock(f"{MOST_TURNS} turns at {self._now:.6f}, and no end of them")
        else:
            self._now, self._num_turns = self._next_at(), 0
            while self._due and self._due[0][0] <= self._now:
                ready.append(heapq.heappop(self._due)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._run_handle(handle)

    def _next_at(self) -> float:
        while self._due and self._due[0][2]._cancelled:
            heapq.heappop(self._due)
        if not self._due:
            raise Deadlock("no process has anything to do")
        return max(self._now, self._due[0][0])

    def _run_handle(self, handle: Any) -> None:
        process = handle._context.get(PROCESS)
        if process is not None and not process.runs:
            if process.is_alive:
                process.held.append(handle)
            return
        try:
            handle._context.run(handle._callback, *handle._args)
        except Exception as error:
            told = {"message": f"{handle._callback}", "exception": error, "handle": handle}
            self.call_exception_handler(told)

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._due, (when, self._num_timers, timer))
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)

        self.threads.Thread(target=run, name="executor").start()
        return asyncio.wrap_future(future, loop=self)

    async def create_connection(self, protocol_factory: Any, host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        return await self.net.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        return self.net.listen(protocol_factory, host, port)

    def _task(self, loop: Any, coro: Any, context: Context | None = None) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=loop, context=context)
        process = (context or copy_context()).get(PROCESS)
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task
