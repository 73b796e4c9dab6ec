"""When a request that could not go on is tried again, and when it is given up."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from core.errors import Overloaded, Preempted
from core.request import Request

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_FAILURES = 4
"""Lost nodes and broken hand-overs one request may meet."""
MAX_WAIT_S = 30.0
"""How long a request without a token may stand first in line before it is refused."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
POLL_S = 0.05


async def patiently(request: Request, call: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat ``call`` while it is refused for want of room.

    A request that has emitted tokens waits for as long as it takes: what has begun is not
    dropped. Another raises Overloaded after MAX_WAIT_S.
    """
    began_at = time.monotonic()
    while True:
        try:
            return await call()
        except Overloaded:
            if not request.output_ids and time.monotonic() - began_at > MAX_WAIT_S:
                raise
        await asyncio.sleep(POLL_S)


@dataclass(slots=True)
class Retries:
    """One request's budget of failures; preemption is none."""

    num_failures: int = 0

    async def pause(self, error: Exception) -> None:
        """Wait before the next try, or raise ``error`` when there shall be none."""
        if isinstance(error, Preempted):
            return
        self.num_failures += 1
        if self.num_failures > MAX_FAILURES:
            raise error
        log.warning("trying again, %d of %d: %s", self.num_failures, MAX_FAILURES, error)
        pause_s = min(FIRST_PAUSE_S * 2**self.num_failures, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
