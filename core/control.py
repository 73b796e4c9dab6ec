"""Control calls to a rank in one epoch: interface of callers, in-process client, and server.

The envelope of each call carries the epoch of the called rank; the messages do not.
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
"""Handler of a rank's calls: ``handle(epoch, method, payload)``."""
Methods = Mapping[str, tuple[type | None, Callable[[Any], Any]]]
"""Methods by name: the class of the request (None: no payload), and the handler.

A handler returns the reply, None for Empty, or an awaitable of either.
"""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Empty:
    """Reply of a method that returns nothing."""


class Control(Protocol):
    """Client of a rank in one epoch.

    If the rank is lost or in a later epoch, ``call`` raises RankLost or returns a packed Failure
    that stands for RankLost.
    """

    async def call(self, method: str, payload: bytes) -> bytes: ...

    async def close(self) -> None:
        """Close connections, if there are any. Calls in progress fail."""
        return


class InProcessControl(Control):
    """Client of a rank in the same process. Messages are encoded as for a remote rank."""

    def __init__(self, handler: Handler, epoch: int) -> None:
        self._handler = handler
        self._epoch = epoch

    async def call(self, method: str, payload: bytes) -> bytes:
        return await self._handler(self._epoch, method, payload)


class Service:
    """Server of a rank's methods in one epoch. Calls for other epochs are refused."""

    def __init__(self, name: str, epoch: int, methods: Methods) -> None:
        self._name = name
        self._epoch = epoch
        self._methods = methods

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes:
        """Handle one call. The reply to a call that fails is a packed Failure."""
        try:
            if epoch != self._epoch:
                raise RankLost(
                    f"the call is for epoch {epoch}, but this rank is in epoch {self._epoch}"
                )
            if method not in self._methods:
                raise TandemError(f"this rank has no method {method!r}, only {list(self._methods)}")
            schema, answer = self._methods[method]
            reply = answer(unpack(schema, payload) if schema else None)
            if inspect.isawaitable(reply):
                reply = await reply
            return pack(Empty() if reply is None else reply)
        except Exception as error:
            is_ours = not isinstance(error, (TandemError, ValueError))
            level = logging.ERROR if is_ours else logging.INFO
            log.log(level, "%s: call of %s failed: %s", self._name, method, error, exc_info=is_ours)
            if is_out_of_resources(error):
                error = Overloaded(f"{type(error).__name__}: {error}")
            return encode_failure(error)


async def call_rank(
    control: Control, method: str, message: Any, reply: type[Reply], timeout_s: float
) -> Reply:
    """Call a method and decode its reply. ``message`` is None for a method without payload.

    Raises the error that the rank replied with, or RankLost if no reply comes within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            data = await control.call(method, b"" if message is None else pack(message))
    except TimeoutError:
        raise RankLost(f"the rank did not answer {method} within {timeout_s} s") from None
    return decode(reply, data)
