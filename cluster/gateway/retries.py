"""When a request that could not go on is tried again, and when it is given up."""

import asyncio
import logging
import random
from dataclasses import dataclass

from core.errors import Preempted

log = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Lost nodes and broken hand-overs one request may meet without a token in between."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(slots=True)
class Retries:
    """One request's budget of failures; preemption is none, and a token fills it up again."""

    num_failures: int = 0

    def progressed(self) -> None:
        self.num_failures = 0

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
