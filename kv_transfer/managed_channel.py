"""One end of one channel, from its first try to its end, as D's links and P hold it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tandem.core.tasks import Tasks
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.waiting import SLACK_S


@dataclass(eq=False)
class ManagedChannel:
    """The channel that both ends call ``nonce``, which ``building`` makes. ``hang_up`` has the peer
    end its side; it is called once a channel that was built is dropped."""

    nonce: str
    tasks: Tasks
    building: Coroutine[Any, Any, Channel]
    close_remote: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._building = self.tasks.start(self.building)
        self._used_at = time.monotonic()

    @property
    def is_usable(self) -> bool:
        """Being built, or built and not failed since."""
        task = self._building
        return not task.done() or (task.exception() is None and task.result().failure is None)

    def is_idle(self, for_s: float) -> bool:
        return time.monotonic() - self._used_at > for_s

    async def channel(self) -> Channel:
        """Once built; whoever waits may be cancelled. Raises what it failed of."""
        self._used_at = time.monotonic()
        channel = await asyncio.shield(self._building)
        if channel.failure is not None:
            raise channel.failure
        return channel

    def drop(self, reason: str) -> None:
        """End the channel, also if it is yet to be built."""
        self.tasks.start(self._drop(reason))

    async def _drop(self, reason: str) -> None:
        await asyncio.wait([self._building])
        if self._building.exception() is None:
            channel = self._building.result()
            channel.abort(reason)
            if self.close_remote is not None:
                await self.close_remote()
            # A channel that is later than this has said so in the log.
            late_s = 2 * channel.timeout_s + SLACK_S
            await asyncio.wait([asyncio.wrap_future(channel.terminal)], timeout=late_s)
