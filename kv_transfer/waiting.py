"""Timeouts around backend calls that may block indefinitely."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tandem.core.errors import HandoverError
from tandem.core.tasks import start_in_thread
from tandem.kv_transfer.base import Channel

Result = TypeVar("Result")
log = logging.getLogger(__name__)
SLACK_S = 1.0
"""Extra seconds before a timeout of this module fires.

The backend's own timeout and the peer's error say more about the cause. They can arrive first.
"""


async def open_with_deadline(make: Callable[[], Channel], timeout_s: float) -> Channel:
    """Run the blocking function ``make`` on a separate thread and return its channel.

    On a timeout, or if the caller is cancelled, the thread is abandoned. If it makes a channel
    after that, the channel is aborted.

    Raises:
        HandoverError: The channel was not set up within ``timeout_s`` plus SLACK_S.
        Exception: Any error of ``make``.
    """
    making = start_in_thread(make)
    try:
        return await _within(making, timeout_s + SLACK_S, "setting up a channel")
    except BaseException:
        if not making.done():
            log.error("gave up setting up a channel; its thread is abandoned")
        making.add_done_callback(_abort_late)
        raise


async def wait_for_transfer(future: "Future[None]", channel: Channel) -> None:
    """Wait for ``future``, which is the ``done`` of a transfer.

    Raises:
        HandoverError: The transfer failed, or the backend exceeded its own timeout. In both cases
            the tensor must go into quarantine.
    """
    await _within(future, channel.timeout_s + SLACK_S, f"a transfer on channel {channel.name}")


async def _within(future: "Future[Result]", timeout_s: float, work: str) -> Result:
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda late: late.cancelled() or late.exception())
    await asyncio.wait([waiting], timeout=timeout_s)
    if not waiting.done():
        raise HandoverError(f"{work} did not finish within {timeout_s} s")
    return waiting.result()


def _abort_late(making: "Future[Channel]") -> None:
    if making.exception() is None:
        making.result().abort("set up after its deadline")
