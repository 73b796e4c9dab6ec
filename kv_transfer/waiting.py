"""Deadlines of our own around what a backend may block in for ever."""

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
"""The backend's own deadline, or the other side's reason, may be a little behind."""


async def open_with_deadline(make: Callable[[], Channel], timeout_s: float) -> Channel:
    """Run ``make``, which blocks, on a thread of its own.

    Raises what it raises, HandoverError after ``timeout_s`` plus a little: its thread is
    abandoned then, as where nobody waits any more, and a channel that it still makes is aborted.
    """
    making = start_in_thread(make)
    try:
        return await _within(making, timeout_s + SLACK_S, "a channel was not set up")
    except BaseException:
        if not making.done():
            log.error("setting up a channel is waited for no more; its thread is abandoned")
        making.add_done_callback(_abort_late)
        raise


async def wait_for_transfer(future: "Future[None]", channel: Channel) -> None:
    """Wait for a transfer's ``done``.

    Raises HandoverError: the transfer's own, or, when the backend does not even keep its
    deadline, one of ours; the tensor belongs into quarantine then.
    """
    await _within(future, channel.timeout_s + SLACK_S, f"channel {channel.name} hangs: no result")


async def _within(future: "Future[Result]", timeout_s: float, failure: str) -> Result:
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda late: late.cancelled() or late.exception())
    await asyncio.wait([waiting], timeout=timeout_s)
    if not waiting.done():
        raise HandoverError(f"{failure} within {timeout_s} s")
    return waiting.result()


def _abort_late(making: "Future[Channel]") -> None:
    if making.exception() is None:
        making.result().abort("it was set up too late")
