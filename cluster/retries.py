"""When a request that could not go on is tried again, and when it is given up."""

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field

from core.errors import Overloaded, Preempted

log = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Lost nodes and broken hand-overs one request may meet."""
MAX_WAIT_S = 30.0
"""How long a request without a token may wait for pages before it is refused."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(slots=True)
class Retries:
    """One request's budget. A full pool is waited out, for ever once tokens were emitted: what
    has begun is not dropped. Failures are counted."""

    num_failures: int = 0
    num_waits: int = 0
    began_at: float = field(default_factory=time.monotonic)

    async def pause(self, error: Exception, *, is_started: bool) -> None:
        """Wait before the next try, or raise ``error`` when there shall be none."""
        if isinstance(error, Preempted):
            self.num_waits = 0
        elif isinstance(error, Overloaded):
            self.num_waits += 1
            if not is_started and time.monotonic() - self.began_at > MAX_WAIT_S:
                raise error
        else:
            self.num_failures += 1
            if self.num_failures > MAX_FAILURES:
                raise error
            log.warning("trying again, %d of %d: %s", self.num_failures, MAX_FAILURES, error)
        doublings = max(self.num_failures, self.num_waits)
        pause_s = min(FIRST_PAUSE_S * 2**doublings, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
