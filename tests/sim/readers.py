"""How clients read the messages of a gateway, in place of gRPC's flow control."""

import asyncio
import math
from dataclasses import dataclass


@dataclass(eq=False)
class Reader:
    """Reads ``bytes_per_s``. After ``stalls_after`` bytes it pauses once for ``stalls_s``.

    By default no piece waits.
    """

    bytes_per_s: float = math.inf
    stalls_after: float = math.inf
    stalls_s: float = 1e6
    _num_bytes: int = 0

    async def read(self, num_bytes: int) -> None:
        """Return when a piece of ``num_bytes`` has been read."""
        self._num_bytes += num_bytes
        if self._num_bytes > self.stalls_after:
            self.stalls_after = math.inf
            await asyncio.sleep(self.stalls_s)  # time: virtual
        if self.bytes_per_s < math.inf:
            await asyncio.sleep(num_bytes / self.bytes_per_s)  # time: virtual
