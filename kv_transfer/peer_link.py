"""A decode rank's connections to prefill ranks: one link per epoch of a prefill rank."""

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.core.control import Control, Empty, call_rank
from tandem.core.errors import HandoverError, RankLost, SequenceEnded, StalePages, TandemError
from tandem.core.identity import Identity
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.caches import Span, staging_view
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.managed_channel import ManagedChannel
from tandem.kv_transfer.messages import CloseChannel, Connect, ConnectReply, Send, SendReply
from tandem.kv_transfer.staging import Buffer
from tandem.kv_transfer.waiting import open_with_deadline, wait_for_transfer

log = logging.getLogger(__name__)
MAX_CHUNKS_PER_LINK = 3
"""Maximum number of chunks of one link in flight.

Typically, the prefill rank reads the first one, the second is on the network, and the request for
the third is on its way.
"""


@dataclass(eq=False)
class PeerLink:
    """Connection to one epoch of a prefill rank, over which all of its chunks are received.

    Each chunk in flight needs one of MAX_CHUNKS_PER_LINK slots. This bounds the staging that a
    stopped peer can block. A caller of ``reserve_slot`` must then call ``transfer_chunk``, which
    frees the slot. The channel is rebuilt after a failure.

    Attributes:
        local_rank: Name and epoch of this rank, sent to the prefill rank.
        owner: Name of the prefill rank's process, for messages.
        epoch: Epoch of the prefill rank.
        num_transferring: Number of slots in use.
    """

    local_rank: tuple[str, int]
    owner: str
    epoch: int
    control: Control
    endpoint: TransferEndpoint
    num_transferring: int = 0
    _slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CHUNKS_PER_LINK)
    )
    _managed: ManagedChannel | None = None

    def __post_init__(self) -> None:
        self.lease_s = self.endpoint.config.lease_s

    async def ensure_channel(self) -> tuple[ManagedChannel, Channel]:
        """Return the usable, warmed-up channel and its manager; build one if there is none.

        If the channel fails, the caller must drop the manager. That closes the prefill rank's end,
        which ends a blocked receive.

        Raises:
            LayoutMismatch: The prefill rank does not cache what this rank needs.
            RankLost: The prefill rank does not answer, or has another epoch.
            HandoverError: The channel could not be built.
        """
        managed = self._managed
        if managed is None or not managed.is_usable:
            nonce = secrets.token_hex(16)
            close_remote = partial(self._close_remote, nonce)
            managed = self._managed = ManagedChannel(
                nonce=nonce,
                tasks=self.endpoint.tasks,
                building=self._connect(nonce),
                close_remote=close_remote,
            )
        return managed, await managed.channel()

    @property
    def has_channel(self) -> bool:
        """Whether there is a usable channel, or one that is being built."""
        return self._managed is not None and self._managed.is_usable

    def drop_if_idle(self, idle_s: float) -> None:
        """End the channel if it has not been used for ``idle_s`` seconds."""
        if (
            self._managed is not None
            and self._managed.is_idle(idle_s)
            and not self.num_transferring
        ):
            self.drop(f"not used for {idle_s} s")

    def drop(self, reason: str) -> None:
        """End the channel, if any; the next ``ensure_channel`` builds another."""
        if self._managed is not None:
            self._managed.drop(reason)
        self._managed = None

    async def reserve_slot(self) -> Buffer:
        """Wait for a slot, the channel and a staging buffer; ``transfer_chunk`` frees the slot."""
        await self._slots.acquire()
        self.num_transferring += 1
        try:
            await self.ensure_channel()
            return await self.endpoint.staging.reserve(self.endpoint.deadlines.staging_s)
        except BaseException:
            self._release_slot()
            raise

    async def transfer_chunk(self, identity: Identity, span: Span, buffer: Buffer) -> SendReply:
        """Receive one chunk of the prefill rank's pages into ``buffer``.

        The call must not be cancelled. After an error, the buffer returns to the pool once nothing
        can write to it any more. Errors other than the two below end the channel.

        Raises:
            SequenceEnded: The prefill rank no longer offers the sequence.
            StalePages: The prefill rank's pages have another owner.
        """
        data = staging_view(span, buffer).flatten()
        staging = self.endpoint.staging
        channel = None
        try:
            managed, channel = await self.ensure_channel()
            where = span.group.name, span.lo, span.hi
            message = Send(identity, *where, managed.nonce, channel.requested_chunks[-1] + 1)
            channel.requested_chunks.append(message.number)
            reply: SendReply = await self.call(
                method="send", message=message, reply=SendReply, wait_s=channel.timeout_s
            )
            if (reply.transfer_id, reply.num_bytes) != (channel.num_transfers, data.nbytes):
                raise HandoverError(
                    f"{self.owner}: reply {reply} does not fit {message} for {data.nbytes} B"
                )
            await wait_for_transfer(channel.recv(data).done, channel)
            return reply
        except BaseException as error:
            if channel is None or isinstance(error, (SequenceEnded, StalePages)):
                staging.free(buffer)
            else:
                channel.abort(f"a chunk of {identity} failed: {error}")
                managed.drop("a transfer failed")
                staging.quarantine(buffer, channel.terminal)
            raise
        finally:
            self._release_slot()

    def _release_slot(self) -> None:
        self.num_transferring -= 1
        self._slots.release()

    async def call(self, method: str, message: Any, reply: type, wait_s: float = 0.0) -> Any:
        """Make one control call to the prefill rank, within ``wait_s`` plus ``Deadlines.call_s``.

        All failures are raised as RankLost or HandoverError.
        """
        try:
            return await call_rank(
                control=self.control,
                method=method,
                message=message,
                reply=reply,
                timeout_s=wait_s + self.endpoint.deadlines.call_s,
            )
        except (RankLost, HandoverError):
            raise
        except (TandemError, ValueError, OSError) as error:
            raise HandoverError(f"{self.owner}: {method}: {error}") from error

    async def _connect(self, nonce: str) -> Channel:
        channel_factory = self.endpoint.channel_factory
        layout = self.endpoint.caches.layout
        hello = Connect(
            *self.local_rank, nonce, channel_factory.backend, layout.compatibility_facts()
        )
        address: ConnectReply = await self.call("connect", hello, ConnectReply)
        self.lease_s = address.lease_s
        make = partial(channel_factory.connect, address.address, nonce, self.owner)
        try:
            return await open_with_deadline(make, channel_factory.timeout_s)
        except BaseException:
            self.endpoint.tasks.start(self._close_remote(nonce))
            raise

    async def _close_remote(self, nonce: str) -> None:
        try:
            await self.call("close_channel", CloseChannel(nonce), Empty)
        except TandemError as error:
            log.info("%s: closing its channel failed: %s", self.owner, error)
