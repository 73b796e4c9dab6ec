"""D's ends of channels: one link per life of a prefill rank, rebuilt after any failure."""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core.control import Control, Done, ask
from core.errors import HandoverError, RankLost, TandemError
from kv_transfer.base import Channel
from kv_transfer.line import Line
from kv_transfer.messages import Accepted, Connect, HangUp
from kv_transfer.side import Side
from kv_transfer.waiting import opened

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Link:
    """The way to one (owner, epoch). Whoever transfers holds ``lock``, in order of asking.

    ``me`` is this rank as P knows it, its seat and epoch.
    """

    me: tuple[str, int]
    owner: str
    epoch: int
    control: Control
    side: Side
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _line: Line | None = None

    def __post_init__(self) -> None:
        self.lease_s = self.side.config.lease_s

    async def ready(self) -> tuple[Line, Channel]:
        """A line with its channel, warm and usable, built anew where there is none. Who finds that
        it fails drops it, which has P end its side: that is what stops a receive.

        Raises LayoutMismatch, RankLost (another epoch, no answer) or HandoverError.
        """
        line = self._line
        if line is None or not line.is_usable:
            nonce = secrets.token_hex(16)
            hang_up = partial(self._hang_up, nonce)
            line = self._line = Line(nonce, self.side.tasks, self._connect(nonce), hang_up)
        return line, await line.channel()

    @property
    def has_channel(self) -> bool:
        """A usable channel, or one that is being built."""
        return self._line is not None and self._line.is_usable

    def drop_if_idle(self, idle_s: float) -> None:
        """End a channel that nobody has used for ``idle_s``."""
        if self._line is not None and self._line.is_idle(idle_s) and not self.lock.locked():
            self.drop(f"not used for {idle_s} s")

    def drop(self, reason: str) -> None:
        """End whatever channel there is; the next `ready` builds another."""
        if self._line is not None:
            self._line.drop(reason)
        self._line = None

    async def call(self, method: str, message: Any, reply: type, wait_s: float = 0.0) -> Any:
        """One control call to this owner; may take ``wait_s`` plus the usual deadline.

        Raises RankLost or HandoverError, whatever went wrong there.
        """
        try:
            return await ask(
                self.control, method, message, reply, wait_s + self.side.deadlines.call_s
            )
        except (RankLost, HandoverError):
            raise
        except (TandemError, ValueError, OSError) as error:
            raise HandoverError(f"{self.owner}: {method}: {error}") from error

    async def _connect(self, nonce: str) -> Channel:
        maker, layout = self.side.maker, self.side.caches.layout
        hello = Connect(*self.me, nonce, maker.backend, layout.facts())
        address: Accepted = await self.call("connect", hello, Accepted)
        self.lease_s = address.lease_s
        make = partial(maker.connect, address.address, nonce, self.owner)
        try:
            return await opened(make, maker.timeout_s)
        except BaseException:
            self.side.tasks.start(self._hang_up(nonce))
            raise

    async def _hang_up(self, nonce: str) -> None:
        try:
            await self.call("hang_up", HangUp(nonce), Done)
        except TandemError as error:
            log.info("%s was not told to hang up: %s", self.owner, error)
