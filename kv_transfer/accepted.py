"""P's ends of channels, by nonce."""

import asyncio
from functools import partial

from core.errors import HandoverError
from core.tasks import Tasks, in_thread
from kv_transfer.base import Channel, ChannelMaker


class AcceptedChannels:
    """At most one channel per peer: a new one replaces the old. Owned by one asyncio loop."""

    def __init__(self, maker: ChannelMaker, tasks: Tasks) -> None:
        self._maker = maker
        self._tasks = tasks
        self._accepting: dict[str, tuple[str, asyncio.Task[Channel]]] = {}

    def __len__(self) -> int:
        return len(self._accepting)

    async def accept(self, nonce: str, peer: str) -> str:
        """Begin to build P's end, dropping the peer's old one. Returns the address for D."""
        address = await in_thread(self._maker.listen)
        for old in [n for n, (owner, _) in self._accepting.items() if owner == peer]:
            self.drop(old)
        self._accepting[nonce] = (peer, self._tasks.start(self._build(nonce, peer)))
        return address

    async def get(self, nonce: str) -> Channel:
        """The channel, once built. Raises HandoverError if there is none or it failed."""
        if nonce not in self._accepting:
            raise HandoverError(f"no channel {nonce!r} is open here")
        channel = await asyncio.shield(self._accepting[nonce][1])
        if channel.failure is not None:
            raise channel.failure
        return channel

    async def _build(self, nonce: str, peer: str) -> Channel:
        try:
            return await in_thread(partial(self._maker.accept, nonce, peer))
        except BaseException:
            self._accepting.pop(nonce, None)
            raise

    def drop(self, nonce: str) -> None:
        """End a channel; one that is still being built ends when it is."""
        _, building = self._accepting.pop(nonce, ("", None))
        if building is not None:
            self._tasks.start(_end(building))

    def drop_all(self) -> None:
        for nonce in list(self._accepting):
            self.drop(nonce)


async def _end(building: "asyncio.Task[Channel]") -> None:
    await asyncio.wait([building])
    if building.exception() is None:
        channel = building.result()
        channel.abort("dropped")
        await asyncio.wrap_future(channel.terminal)
