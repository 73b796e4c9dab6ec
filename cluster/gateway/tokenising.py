"""Threads that check requests and make tokens of their texts, apart from all other threads."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from core.errors import Overloaded

LONG_CHARS = 50_000
"""Characters from which on a text has to wait for other long texts; short ones never do."""
MAX_CHARS = 16 << 20
"""Maximum of characters of all texts that wait or are being tokenised."""
TRIM_CHARS = 500_000
"""Characters from which on the memory that a text took goes back to the system at once. It is some
hundred bytes a character, which glibc would keep in pieces."""
Result = TypeVar("Result")


class TokeniserThreads:
    """One thread for short texts and one for long ones, owned by one asyncio loop until `close`."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "tokenise")
        self._long = ThreadPoolExecutor(1, "tokenise-long")
        self._num_chars = 0

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` on a text of ``num_chars`` and return its result.

        Raises:
            Overloaded: Too much text waits already.
        """
        if self._num_chars and self._num_chars + num_chars > MAX_CHARS:
            raise Overloaded(f"{self._num_chars} characters are being tokenised already")
        self._num_chars += num_chars
        loop = asyncio.get_running_loop()
        thread = self._long if num_chars > LONG_CHARS else self._short
        posted = thread.submit(work if num_chars < TRIM_CHARS else partial(_then_trim, work))

        def ended(_: "Future[Result]") -> None:
            # A caller that was cancelled does not end what its thread is busy with.
            loop.call_soon_threadsafe(self._forget, num_chars)

        posted.add_done_callback(ended)
        return await asyncio.wrap_future(posted)

    def close(self) -> None:
        """End both threads when they are idle; what has not begun is not done."""
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self, num_chars: int) -> None:
        self._num_chars -= num_chars


def _then_trim(work: Callable[[], Result]) -> Result:
    try:
        return work()
    finally:
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc alone has it
            trim(0)
