"""Threads that validate and tokenise requests, separate from all other threads."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tandem.core.errors import Overloaded

LONG_CHARS = 50_000
"""Number of characters above which a text is long.

Long texts share one thread. Short texts have another one and never wait for long texts.
"""
MAX_CHARS = 16 << 20
"""Maximum characters of all texts that wait for a thread or are being tokenised by it."""
TRIM_CHARS = 500_000
"""Length in characters of a text after which freed memory is returned to the system at once.

Tokenising takes about 100 bytes per character, which glibc would otherwise keep as fragments.
"""
Result = TypeVar("Result")
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # only glibc has it


class TokeniserThread:
    """One thread and its queue of texts, owned by one asyncio loop until ``close``."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self.num_chars = 0

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` on a text of ``num_chars`` and return its result.

        Raises:
            Overloaded: Too much text is waiting already.
        """
        if self.num_chars and self.num_chars + num_chars > MAX_CHARS:
            raise Overloaded(
                f"the tokeniser is busy with {self.num_chars} characters of other requests"
            )
        self.num_chars += num_chars
        loop = asyncio.get_running_loop()
        posted = self._executor.submit(work)

        def ended(done: "Future[Result]") -> None:
            if num_chars >= TRIM_CHARS and not done.cancelled():
                _trim(0)
            # Count the text until its work ends, which a cancelled caller does not interrupt.
            loop.call_soon_threadsafe(self._forget, num_chars)

        posted.add_done_callback(ended)
        return await asyncio.wrap_future(posted)

    def close(self) -> None:
        """End the thread after its current work. Queued work is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget(self, num_chars: int) -> None:
        self.num_chars -= num_chars


class TokeniserThreads:
    """One thread for short texts and one for long texts, which therefore never delay short ones."""

    def __init__(self) -> None:
        self._short = TokeniserThread("tokenise")
        self._long = TokeniserThread("tokenise-long")

    @property
    def num_chars(self) -> int:
        """Number of characters of all texts that wait or are being tokenised."""
        return self._short.num_chars + self._long.num_chars

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` on the thread for texts of ``num_chars`` and return its result."""
        thread = self._long if num_chars > LONG_CHARS else self._short
        return await thread.run(num_chars, work)

    def close(self) -> None:
        """End both threads after their current work. Queued work is dropped."""
        for thread in (self._short, self._long):
            thread.close()
