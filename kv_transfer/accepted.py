"""P's ends of channels: at most one per decode rank, whichever life of it asked last."""

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial

from core.errors import HandoverError
from core.tasks import in_thread
from kv_transfer.base import Channel
from kv_transfer.messages import Connect
from kv_transfer.side import Side
from kv_transfer.waiting import ended, opened


@dataclass(slots=True)
class Accepted:
    """The channel of one life of ``peer``, perhaps still being built; when it was used last."""

    peer: str
    epoch: int
    building: asyncio.Task[Channel]
    used_at: float = field(default_factory=time.monotonic)


class AcceptedChannels:
    """By nonce. Owned by one asyncio loop."""

    def __init__(self, side: Side) -> None:
        self._maker = side.maker
        self._tasks = side.tasks
        self._accepted: dict[str, Accepted] = {}

    def __len__(self) -> int:
        return len(self._accepted)

    async def accept(self, hello: Connect) -> str:
        """Begin to build P's end, dropping what the peer had before. Returns the address for D.

        Raises HandoverError when a later life of the peer has been here.
        """
        address = await in_thread(self._maker.listen)
        for nonce, old in list(self._accepted.items()):
            if old.peer != hello.peer:
                continue
            if old.epoch > hello.epoch:
                raise HandoverError(f"{hello.peer}: epoch {hello.epoch} after {old.epoch}")
            self.drop(nonce)
        building = self._tasks.start(self._build(hello.nonce, hello.peer))
        self._accepted[hello.nonce] = Accepted(hello.peer, hello.epoch, building)
        return address

    async def get(self, nonce: str) -> Channel:
        """The channel, once built. Raises HandoverError if there is none or it failed."""
        if nonce not in self._accepted:
            raise HandoverError(f"no channel {nonce!r} is open here")
        accepted = self._accepted[nonce]
        accepted.used_at = time.monotonic()
        channel = await asyncio.shield(accepted.building)
        if channel.failure is not None:
            raise channel.failure
        return channel

    async def _build(self, nonce: str, peer: str) -> Channel:
        try:
            return await opened(partial(self._maker.accept, nonce, peer), self._maker.timeout_s)
        except BaseException:
            self._accepted.pop(nonce, None)
            raise

    def drop(self, nonce: str) -> None:
        """End a channel; one that is still being built ends when it is."""
        accepted = self._accepted.pop(nonce, None)
        if accepted is not None:
            self._tasks.start(_end(accepted.building))

    def sweep(self, idle_s: float) -> None:
        """Drop what was not used for ``idle_s``: its peer is dead, or needs it no more."""
        horizon = time.monotonic() - idle_s
        for nonce, accepted in list(self._accepted.items()):
            if accepted.used_at < horizon:
                self.drop(nonce)

    def drop_all(self) -> None:
        for nonce in list(self._accepted):
            self.drop(nonce)


async def _end(building: "asyncio.Task[Channel]") -> None:
    await asyncio.wait([building])
    if building.exception() is None:
        channel = building.result()
        channel.abort("dropped")
        await ended(channel)
