"""D's ends of channels: one link per life of a prefill rank, rebuilt after any failure."""

import asyncio
import logging
import secrets
import time
from functools import partial
from typing import Any

from core.control import Control, Done, ask
from core.errors import HandoverError, NodeLost, TandemError
from kv_transfer.base import Channel
from kv_transfer.messages import Address, Connect, HangUp
from kv_transfer.side import Side
from kv_transfer.waiting import ended, opened

log = logging.getLogger(__name__)


class Link:
    """The way to one (owner, epoch). Whoever transfers holds ``lock``, in order of asking.

    ``me`` is this rank as P knows it, its seat and epoch; ``num_pulls`` hold on to the link.
    """

    def __init__(
        self, me: tuple[str, int], owner: str, epoch: int, control: Control, side: Side
    ) -> None:
        self.peer, self._my_epoch = me
        self.owner = owner
        self.epoch = epoch
        self.lease_s = side.config.lease_s
        self.lock = asyncio.Lock()
        self.num_pulls = 0
        self._used_at = time.monotonic()
        self._control = control
        self._side = side
        self._connecting: asyncio.Task[tuple[str, Channel]] | None = None

    async def ready(self) -> tuple[str, Channel]:
        """The nonce and a warm, usable channel, built anew where there is none.

        Raises LayoutMismatch, NodeLost (another epoch, no answer) or HandoverError.
        """
        self._used_at = time.monotonic()
        if not self.has_channel:
            self._connecting = self._side.tasks.start(self._connect())
        assert self._connecting is not None
        return await asyncio.shield(self._connecting)

    @property
    def has_channel(self) -> bool:
        """A usable channel, or one that is being built."""
        connecting = self._connecting
        if connecting is None or not connecting.done():
            return connecting is not None
        failed = connecting.cancelled() or connecting.exception() is not None
        return not failed and connecting.result()[1].failure is None

    def drop_if_idle(self, idle_s: float) -> None:
        """End a channel that nobody has used for ``idle_s``."""
        if not self.lock.locked() and time.monotonic() - self._used_at > idle_s:
            self.drop(f"not used for {idle_s} s")

    def drop(self, reason: str) -> None:
        """End whatever channel there is; the next `ready` builds another."""
        if self._connecting is not None:
            self._side.tasks.start(self._drop_when_built(self._connecting, reason))
        self._connecting = None

    def discard(self, nonce: str, channel: Channel, reason: str) -> None:
        """End a failed channel here, and have P end its side: that is what stops a receive."""
        channel.abort(reason)
        self._side.tasks.start(self._end(nonce, channel))

    async def call(self, method: str, message: Any, reply: type, wait_s: float = 0.0) -> Any:
        """One control call to this owner; may take ``wait_s`` plus the usual deadline.

        Raises NodeLost or HandoverError, whatever went wrong there.
        """
        try:
            return await ask(
                self._control, method, message, reply, wait_s + self._side.deadlines.call_s
            )
        except (NodeLost, HandoverError):
            raise
        except (TandemError, ValueError, OSError) as error:
            raise HandoverError(f"{self.owner}: {method}: {error}") from error

    async def _connect(self) -> tuple[str, Channel]:
        nonce, maker = secrets.token_hex(16), self._side.maker
        layout = self._side.caches.layout
        hello = Connect(self.peer, self._my_epoch, nonce, maker.backend, layout)
        address: Address = await self.call("connect", hello, Address)
        self.lease_s = address.lease_s
        make = partial(maker.connect, address.address, nonce, self.owner)
        try:
            return nonce, await opened(make, maker.timeout_s)
        except BaseException:
            self._side.tasks.start(self._hang_up(nonce))
            raise

    async def _drop_when_built(
        self, connecting: "asyncio.Task[tuple[str, Channel]]", reason: str
    ) -> None:
        await asyncio.wait([connecting])
        if connecting.exception() is None:
            self.discard(*connecting.result(), reason)

    async def _end(self, nonce: str, channel: Channel) -> None:
        await self._hang_up(nonce)
        await ended(channel)

    async def _hang_up(self, nonce: str) -> None:
        try:
            await self.call("hang_up", HangUp(nonce), Done)
        except TandemError as error:
            log.info("%s was not told to hang up: %s", self.owner, error)
