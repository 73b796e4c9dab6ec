"""Lifecycle of one end of a channel, from its construction to its end, on either rank."""

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
    """A channel that is built in the background and can be dropped at any time.

    Attributes:
        nonce: Name of the channel, the same at both ends.
        building: Coroutine that builds the channel; started at once.
        close_remote: Closes the peer's end. Called when the channel is dropped after it was built.
            None on prefill ranks, whose peers close their own ends.
    """

    nonce: str
    tasks: Tasks
    building: Coroutine[Any, Any, Channel]
    close_remote: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._building = self.tasks.start(self.building)
        self._used_at = time.monotonic()

    @property
    def is_usable(self) -> bool:
        """Whether the channel is being built, or is built and has not failed."""
        task = self._building
        return not task.done() or (task.exception() is None and task.result().failure is None)

    def is_idle(self, for_s: float) -> bool:
        return time.monotonic() - self._used_at > for_s

    async def channel(self) -> Channel:
        """Wait until the channel is built and return it; raise its error if it has failed.

        Cancelling the wait does not cancel the construction.
        """
        self._used_at = time.monotonic()
        channel = await asyncio.shield(self._building)
        if channel.failure is not None:
            raise channel.failure
        return channel

    def drop(self, reason: str) -> None:
        """End the channel in the background. If it is still being built, it ends after that."""
        self.tasks.start(self._drop(reason))

    async def _drop(self, reason: str) -> None:
        await asyncio.wait([self._building])
        if self._building.exception() is None:
            channel = self._building.result()
            channel.abort(reason)
            if self.close_remote is not None:
                await self.close_remote()
            # A channel that takes longer has logged an error itself.
            late_s = 2 * channel.timeout_s + SLACK_S
            await asyncio.wait([asyncio.wrap_future(channel.terminal)], timeout=late_s)
