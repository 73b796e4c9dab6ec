"""D's ends of channels: one link per life of a prefill rank, rebuilt after any failure."""

import asyncio
import logging
import secrets
from functools import partial
from typing import Any

from core.control import Control, ask
from core.errors import TandemError
from core.tasks import Tasks, in_thread
from kv_transfer.base import Channel, ChannelMaker
from kv_transfer.layout import Layout
from kv_transfer.messages import Ack, Address, Connect, HangUp
from kv_transfer.options import TransferOptions

log = logging.getLogger(__name__)


class Link:
    """The way to one (owner, epoch). Whoever transfers holds ``lock``, in order of asking."""

    def __init__(
        self,
        name: str,
        owner: str,
        epoch: str,
        control: Control,
        layout: Layout,
        maker: ChannelMaker,
        options: TransferOptions,
        tasks: Tasks,
    ) -> None:
        self.owner = owner
        self.epoch = epoch
        self.control = control
        self.lease_s = options.lease_s
        self.lock = asyncio.Lock()
        self.num_connects = 0
        self._name = name
        self._layout = layout
        self._maker = maker
        self._options = options
        self._tasks = tasks
        self._connecting: asyncio.Task[tuple[str, Channel]] | None = None

    async def ready(self) -> tuple[str, Channel]:
        """The nonce and a warm, usable channel, built anew where there is none.

        Raises LayoutMismatch, NodeLost (another epoch, no answer) or HandoverError.
        """
        if not self._may_work():
            self._connecting = self._tasks.start(self._connect())
        assert self._connecting is not None
        return await asyncio.shield(self._connecting)

    def drop(self, reason: str) -> None:
        """End whatever channel there is; the next `ready` builds another."""
        if self._connecting is not None:
            self._tasks.start(self._drop_when_built(self._connecting, reason))
        self._connecting = None

    def discard(self, nonce: str, channel: Channel, reason: str) -> None:
        """End a failed channel here, and have P end its side: that is what stops a receive."""
        channel.abort(reason)
        self._tasks.start(self._hang_up(nonce, channel))

    async def call(self, method: str, message: Any, reply: type, wait_s: float = 0.0) -> Any:
        """One control call to this owner; may take ``wait_s`` plus the usual deadline."""
        timeout_s = wait_s + self._options.call_timeout_s
        return await ask(self.control, method, message, reply, timeout_s)

    def _may_work(self) -> bool:
        connecting = self._connecting
        if connecting is None or not connecting.done():
            return connecting is not None
        failed = connecting.cancelled() or connecting.exception() is not None
        return not failed and connecting.result()[1].usable

    async def _connect(self) -> tuple[str, Channel]:
        nonce = secrets.token_hex(16)
        hello = Connect(self.epoch, self._name, nonce, self._maker.backend, self._layout)
        address: Address = await self.call("connect", hello, Address)
        self.lease_s = address.lease_s
        connect = partial(self._maker.connect, address.address, nonce, self.owner)
        channel = await in_thread(connect)
        self.num_connects += 1
        return nonce, channel

    async def _drop_when_built(
        self, connecting: "asyncio.Task[tuple[str, Channel]]", reason: str
    ) -> None:
        await asyncio.wait([connecting])
        if connecting.exception() is None:
            self.discard(*connecting.result(), reason)

    async def _hang_up(self, nonce: str, channel: Channel) -> None:
        try:
            await self.call("hang_up", HangUp(nonce), Ack)
        except (TandemError, OSError) as error:
            log.info("%s was not told to hang up: %s", self.owner, error)
        await asyncio.wrap_future(channel.terminal)
