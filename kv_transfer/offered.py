"""P's book of offered sequences: how far each is computed, its lease, and who waits for it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import HandoverError
from kv_transfer.leases import Key, LeaseTable
from kv_transfer.messages import Seal

REMEMBER_S = 600.0
"""How long an ended key is known, so that late calls get its reason and not silence."""


@dataclass(slots=True)
class Offered:
    """One sequence. Pages only ever grow; ``num_tokens`` is per layout group."""

    key: Key
    num_tokens: tuple[int, ...]
    pages: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    seal: Seal | None = None

    def has_more_than(self, num_pulled: tuple[int, ...]) -> bool:
        ahead = any(have > got for have, got in zip(self.num_tokens, num_pulled, strict=True))
        return ahead or self.seal is not None


class OfferBook:
    """Owned by one asyncio loop. A key is unknown, then open, then ended for good."""

    def __init__(
        self, num_groups: int, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.leases = LeaseTable(lease_s, clock)
        self._num_groups = num_groups
        self._clock = clock
        self._open: dict[Key, Offered] = {}
        self._ended: dict[Key, tuple[str, float]] = {}
        self._waiters: dict[Key, set[asyncio.Future[None]]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    def open_keys(self) -> list[Key]:
        return list(self._open)

    def open(self, key: Key) -> bool:
        """Start a key and its lease. False if D released it before it was opened."""
        assert key not in self._open, f"{key} was opened twice"
        if key in self._ended:
            return False
        self._open[key] = Offered(key, (0,) * self._num_groups)
        self.leases.grant(key)
        self._notify(key)
        return True

    def get(self, key: Key) -> Offered | None:
        """The open entry, None while unknown. Raises HandoverError once ended or superseded."""
        if key in self._ended:
            raise HandoverError(f"{key}: {self._ended[key][0]}")
        if key not in self._open:
            newer = max((a for r, a in self._open if r == key[0]), default=-1)
            if newer > key[1]:
                raise HandoverError(f"{key}: attempt {key[1]} was asked for, {newer} is open")
        return self._open.get(key)

    def need(self, key: Key) -> Offered:
        """The open entry. Raises HandoverError for anything else."""
        entry = self.get(key)
        if entry is None:
            raise HandoverError(f"{key}: not offered here")
        return entry

    def advance(self, key: Key, grown: Offered) -> None:
        """Replace an entry by a later state of it; a key that has ended stays ended."""
        before = self._open.get(key)
        if before is None:
            return
        assert grown.pages[: len(before.pages)] == before.pages, f"{key}: pages were exchanged"
        assert all(
            new >= old for new, old in zip(grown.num_tokens, before.num_tokens, strict=True)
        ), f"{key}: {before.num_tokens} tokens shrank to {grown.num_tokens}"
        self._open[key] = grown
        self._notify(key)

    def seal(self, key: Key, make: Callable[[Offered], Seal]) -> None:
        """Close an entry; a key that has ended stays ended."""
        entry = self._open.get(key)
        if entry is not None:
            assert entry.seal is None, f"{key} was sealed twice"
            entry.seal = make(entry)
            self._notify(key)

    def end(self, key: Key, reason: str) -> bool:
        """End a key, known or not. True if it was open: its pages are to be released."""
        was_open = self._open.pop(key, None) is not None
        self.leases.release(key)
        self._ended.setdefault(key, (reason, self._clock()))
        self._notify(key)
        return was_open

    def sweep(self) -> list[Key]:
        """End what expired and return it; forget what ended long ago."""
        horizon = self._clock() - max(REMEMBER_S, 4 * self.leases.lease_s)
        for key in [key for key, (_, at) in self._ended.items() if at < horizon]:
            del self._ended[key]
        expired = self.leases.sweep()
        for key in expired:
            self.end(key, f"its lease of {self.leases.lease_s} s expired")
        return expired

    def renew(self, key: Key) -> None:
        """Raises HandoverError for a key that ended; one not opened yet needs no lease."""
        if self.get(key) is not None and not self.leases.renew(key):
            raise HandoverError(f"{key}: its lease of {self.leases.lease_s} s ran out")

    async def wait(self, key: Key, num_pulled: tuple[int, ...], wait_s: float) -> Offered | None:
        """The entry as soon as it has more than ``num_pulled``, else as it is after ``wait_s``.

        None if it is still unknown then. Raises HandoverError when the key ends meanwhile.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_s
        while True:
            entry = self.get(key)
            remaining_s = give_up_at - loop.time()
            if remaining_s <= 0 or (entry is not None and entry.has_more_than(num_pulled)):
                return entry
            await self._changed(key, remaining_s)

    async def _changed(self, key: Key, wait_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(key, set())
        waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=wait_s)
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(key) is waiters:
                del self._waiters[key]

    def _notify(self, key: Key) -> None:
        for waiter in self._waiters.pop(key, set()):
            if not waiter.done():
                waiter.set_result(None)
