"""How D's control calls reach P: an interface, the serving side, and the in-process form."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from core.errors import HandoverError, NodeLost, TandemError
from core.schema import decode, encode_failure, pack

Reply = TypeVar("Reply")
Handler = Callable[[str, bytes], Awaitable[bytes]]
log = logging.getLogger(__name__)


class Control(Protocol):
    """One P rank as D reaches it. A lost peer is raised as NodeLost."""

    async def call(self, method: str, payload: bytes) -> bytes: ...


class InProcessControl:
    """Calls a handler (`Source.handle`) of the same process, through the same bytes."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def call(self, method: str, payload: bytes) -> bytes:
        return await self._handler(method, payload)


async def ask(
    control: Control, method: str, message: Any, reply: type[Reply], timeout_s: float
) -> Reply:
    """Call and decode. Raises the error P named, or NodeLost when it does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            data = await control.call(method, pack(message))
    except TimeoutError:
        raise NodeLost(f"no answer to {method} within {timeout_s} s") from None
    return decode(reply, data)


async def answer(handle: Callable[[], Awaitable[Any]], method: str) -> bytes:
    """Run a handler and encode its reply, or the error it raised, for the other side."""
    try:
        return pack(await handle())
    except TandemError as error:
        return encode_failure(error)
    except Exception as error:
        log.exception("hand-over handler %s failed", method)
        return encode_failure(HandoverError(f"{method}: {type(error).__name__}: {error}"))
