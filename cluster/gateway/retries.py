"""Pauses between retries."""

import asyncio
import random
from dataclasses import dataclass

FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Retries:
    """Consecutive failures of one operation, and the pauses after them.

    Pauses double up to ``max_pause_s``.
    """

    max_pause_s: float
    num_failures: int = 0

    def reset(self) -> None:
        """Reset the failure count after a success."""
        self.num_failures = 0

    async def pause(self) -> None:
        """Count a failure and wait before the next attempt."""
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self.num_failures, 10), self.max_pause_s)
        self.num_failures += 1
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
