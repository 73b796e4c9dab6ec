"""The thread that owns a rank's tensors, as the hand-over sees it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class EngineThread(Protocol):
    """Runs posted functions one after the other, between two steps (runtime/engine_loop.py)."""

    def post(self, function: Callable[[], Result]) -> "Future[Result]": ...

    async def call(self, function: Callable[[], Result]) -> Result: ...
