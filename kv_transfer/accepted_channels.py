"""Channels that decode ranks have opened to a prefill rank: at most one per decode rank."""

from functools import partial

from tandem.core.errors import HandoverError
from tandem.core.tasks import run_in_thread
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.managed_channel import ManagedChannel
from tandem.kv_transfer.messages import Connect
from tandem.kv_transfer.waiting import open_with_deadline


class AcceptedChannels:
    """All channels that decode ranks have opened to this prefill rank. Owned by one asyncio loop.

    The channel of a decode rank belongs to the latest epoch of that rank.
    """

    def __init__(self, endpoint: TransferEndpoint) -> None:
        self._endpoint = endpoint
        self._accepted: dict[str, tuple[Connect, ManagedChannel]] = {}
        """Channels by nonce, with the message that requested each."""

    def __len__(self) -> int:
        return sum(managed.is_usable for _, managed in self._accepted.values())

    async def accept(self, hello: Connect) -> str:
        """Start to build the prefill rank's end of a channel and drop the peer's previous channel.

        Returns:
            HOST:PORT of the store through which the decode rank connects to this end.

        Raises:
            HandoverError: The peer has a channel of a later epoch.
        """
        channel_factory = self._endpoint.channel_factory
        address = await run_in_thread(channel_factory.listen)
        for old in [old for old, _ in self._accepted.values() if old.peer == hello.peer]:
            if old.epoch > hello.epoch:
                raise HandoverError(
                    f"{hello.peer}: requested a channel for epoch {hello.epoch} after one for the "
                    f"later epoch {old.epoch}"
                )
            self.drop(old.nonce, "the peer requested a new channel")
        make = partial(channel_factory.accept, hello.nonce, hello.peer)
        managed = ManagedChannel(
            hello.nonce, self._endpoint.tasks, open_with_deadline(make, channel_factory.timeout_s)
        )
        self._accepted[hello.nonce] = hello, managed
        return address

    async def get(self, nonce: str) -> Channel:
        """Wait until a channel is built. Raises HandoverError if it is unknown or has failed."""
        if nonce not in self._accepted:
            raise HandoverError(f"this prefill rank has no channel with nonce {nonce!r}")
        return await self._accepted[nonce][1].channel()

    def drop(self, nonce: str, reason: str) -> None:
        """End a channel, if it is known. If it is still being built, it ends after that."""
        if nonce in self._accepted:
            self._accepted.pop(nonce)[1].drop(reason)

    def sweep(self, idle_s: float) -> None:
        """Drop channels that have not been used for ``idle_s`` seconds."""
        for nonce, (_, managed) in list(self._accepted.items()):
            if managed.is_idle(idle_s):
                self.drop(nonce, f"not used for {idle_s} s")

    def drop_all(self) -> None:
        for nonce in list(self._accepted):
            self.drop(nonce, "closed")
