"""Wait in tests until a condition holds. Timeouts suit the slowest machine, and no delay is fixed.
sleeps.py finds tests that wait in another way."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 300.0
"""Only a hang takes this long."""
PAUSE_S = 0.001
SYNC_PAUSE_S = 0.02

Condition = Callable[[], object | Awaitable[object]]


async def until(condition: Condition, *meanwhile: Callable[[], object]) -> None:
    """Wait for ``condition``, and call ``meanwhile`` repeatedly until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await _told(condition):
            for act in meanwhile:
                act()
            await asyncio.sleep(PAUSE_S)


async def _told(condition: Condition) -> object:
    told = condition()
    return await told if inspect.isawaitable(told) else told


def wait_until(
    condition: Callable[[], object], text: str = "in vain", patience_s: float = PATIENCE_S
) -> None:
    """Wait for ``condition`` without an asyncio loop."""
    ends_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < ends_at, text
        time.sleep(SYNC_PAUSE_S)


async def turns(num: int = 10) -> None:
    """Let the event loop run ``num`` times, so that every task that can continue has done so."""
    for _ in range(num):
        await asyncio.sleep(0)


async def for_ever() -> None:
    await asyncio.Event().wait()
