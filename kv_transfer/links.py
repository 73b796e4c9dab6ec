"""D's ends of channels: one link per life of a prefill rank, rebuilt after any failure."""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.core.control import Control, Done, ask
from tandem.core.errors import HandoverError, RankLost, SequenceEnded, StalePages, TandemError
from tandem.core.identity import Identity
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.caches import Span, staged
from tandem.kv_transfer.line import Line
from tandem.kv_transfer.messages import Accepted, Connect, HangUp, Send, Sent
from tandem.kv_transfer.side import Side
from tandem.kv_transfer.staging import Buffer
from tandem.kv_transfer.waiting import opened, settled

log = logging.getLogger(__name__)
MAX_PLACES = 3
"""Of a link: P reads one chunk while another is on the wire, and one is asked for."""


@dataclass(eq=False)
class Link:
    """The way to one (owner, epoch), by which all bytes come: who brings a chunk waits for its
    `place` and then has to `move`. At most MAX_PLACES of its chunks are on their way, so a stopped
    peer holds no more staging than that.

    ``me`` is this rank as P knows it, its seat and epoch.
    """

    me: tuple[str, int]
    owner: str
    epoch: int
    control: Control
    side: Side
    num_moving: int = 0
    _wire: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PLACES))
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
        if self._line is not None and self._line.is_idle(idle_s) and not self.num_moving:
            self.drop(f"not used for {idle_s} s")

    def drop(self, reason: str) -> None:
        """End whatever channel there is; the next `ready` builds another."""
        if self._line is not None:
            self._line.drop(reason)
        self._line = None

    async def place(self) -> Buffer:
        """Wait for a channel and for staging to `move` a chunk into, which gives the place up."""
        await self._wire.acquire()
        self.num_moving += 1
        try:
            await self.ready()
            return await self.side.staging.reserve(self.side.deadlines.staging_s)
        except BaseException:
            self._leave()
            raise

    async def move(self, identity: Identity, span: Span, buffer: Buffer) -> Sent:
        """Bring a chunk from P's pages into staging. Must run to its end; where it raises the
        buffer is given back, as soon as nothing can write there.

        Raises SequenceEnded or StalePages where P has nothing to send; anything else ends the
        channel.
        """
        data, staging, channel = staged(span, buffer).flatten(), self.side.staging, None
        try:
            line, channel = await self.ready()
            where = span.group.name, span.lo, span.hi
            ask = Send(identity, *where, line.nonce, channel.asked[-1] + 1)
            channel.asked.append(ask.number)
            sent: Sent = await self.call("send", ask, Sent, channel.timeout_s)
            if (sent.transfer_id, sent.num_bytes) != (channel.num_transfers, data.nbytes):
                raise HandoverError(f"asked for {ask} of {data.nbytes} B, got {sent}")
            await settled(channel.recv(data).done, channel)
            return sent
        except BaseException as error:
            if channel is None or isinstance(error, (SequenceEnded, StalePages)):
                staging.free(buffer)
            else:
                channel.abort(f"a chunk of {identity} failed: {error}")
                line.drop("it failed")
                staging.quarantine(buffer, channel.terminal)
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        self.num_moving -= 1
        self._wire.release()

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
