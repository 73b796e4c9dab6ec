"""Control calls to one life of a rank: the callers' interface, its in-process form, the server.

The epoch of the rank that is meant travels in each call's envelope, not in the messages.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tandem.core.errors import Overloaded, RankLost, TandemError, is_out_of_resources
from tandem.core.schema import decode, encode_failure, pack, unpack

Reply = TypeVar("Reply")
Handler = Callable[[int, str, bytes], Awaitable[bytes]]
"""``handle(epoch, method, payload)`` of a rank."""
Methods = Mapping[str, tuple[type | None, Callable[[Any], Any]]]
"""By name: the message that it takes (None: no payload), and what answers it with another or, for
Done, with None; at once, or when awaited."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Empty:
    """The reply where there is nothing to tell."""


class Control(Protocol):
    """One life of a rank as its callers reach it. A lost or later life is raised as RankLost,
    or answered by it."""

    async def call(self, method: str, payload: bytes) -> bytes: ...

    async def close(self) -> None:
        """Give up what it keeps open, if anything; calls under way fail."""
        return


class InProcessControl(Control):
    """Calls the ``handle`` of a rank of the same process, through the same bytes."""

    def __init__(self, handler: Handler, epoch: int) -> None:
        self._handler = handler
        self._epoch = epoch

    async def call(self, method: str, payload: bytes) -> bytes:
        return await self._handler(self._epoch, method, payload)


class Service:
    """What one life of a rank answers; nothing that another life was asked for."""

    def __init__(self, name: str, epoch: int, methods: Methods) -> None:
        self._name = name
        self._epoch = epoch
        self._methods = methods

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes:
        """Answer one call; one that fails is answered by a packed Failure."""
        try:
            if epoch != self._epoch:
                raise RankLost(f"epoch {epoch} was asked for, this is {self._epoch}")
            if method not in self._methods:
                raise TandemError(f"no method {method!r}, only {list(self._methods)}")
            schema, answer = self._methods[method]
            reply = answer(unpack(schema, payload) if schema else None)
            if inspect.isawaitable(reply):
                reply = await reply
            return pack(Empty() if reply is None else reply)
        except Exception as error:
            is_ours = not isinstance(error, (TandemError, ValueError))
            level = logging.ERROR if is_ours else logging.INFO
            log.log(level, "%s: %s failed: %s", self._name, method, error, exc_info=is_ours)
            if is_out_of_resources(error):
                error = Overloaded(f"{type(error).__name__}: {error}")
            return encode_failure(error)


async def call_rank(
    control: Control, method: str, message: Any, reply: type[Reply], timeout_s: float
) -> Reply:
    """Call with a message, or None where the method takes none, and decode. Raises the error that
    was answered, or RankLost when there is no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            data = await control.call(method, b"" if message is None else pack(message))
    except TimeoutError:
        raise RankLost(f"no answer to {method} within {timeout_s} s") from None
    return decode(reply, data)
