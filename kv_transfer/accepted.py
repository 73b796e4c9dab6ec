"""P's ends of channels: at most one per decode rank, whichever life of it asked last."""

from functools import partial

from tandem.core.errors import HandoverError
from tandem.core.tasks import in_thread
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.line import Line
from tandem.kv_transfer.messages import Connect
from tandem.kv_transfer.side import Side
from tandem.kv_transfer.waiting import opened


class AcceptedChannels:
    """Owned by one asyncio loop."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._accepted: dict[str, tuple[Connect, Line]] = {}
        """By nonce, with what asked for it."""

    def __len__(self) -> int:
        return sum(line.is_usable for _, line in self._accepted.values())

    async def accept(self, hello: Connect) -> str:
        """Begin to build P's end, dropping what the peer had before. Returns the address for D.

        Raises HandoverError when a later life of the peer has been here.
        """
        maker = self._side.maker
        address = await in_thread(maker.listen)
        for old in [old for old, _ in self._accepted.values() if old.peer == hello.peer]:
            if old.epoch > hello.epoch:
                raise HandoverError(f"{hello.peer}: epoch {hello.epoch} after {old.epoch}")
            self.drop(old.nonce, "another is asked for")
        make = partial(maker.accept, hello.nonce, hello.peer)
        line = Line(hello.nonce, self._side.tasks, opened(make, maker.timeout_s))
        self._accepted[hello.nonce] = hello, line
        return address

    async def get(self, nonce: str) -> Channel:
        """The channel, once built. Raises HandoverError if there is none or it failed."""
        if nonce not in self._accepted:
            raise HandoverError(f"no channel {nonce!r} is open here")
        return await self._accepted[nonce][1].channel()

    def drop(self, nonce: str, reason: str) -> None:
        """End a channel; one that is still being built ends when it is."""
        if nonce in self._accepted:
            self._accepted.pop(nonce)[1].drop(reason)

    def sweep(self, idle_s: float) -> None:
        """Drop what was not used for ``idle_s``: its peer is dead, or needs it no more."""
        for nonce, (_, line) in list(self._accepted.items()):
            if line.is_idle(idle_s):
                self.drop(nonce, f"not used for {idle_s} s")

    def drop_all(self) -> None:
        for nonce in list(self._accepted):
            self.drop(nonce, "closed")
