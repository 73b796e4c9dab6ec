"""Sequences that a prefill rank offers: how far each is computed, its lease and its waiters."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tandem.core.errors import SequenceEnded
from tandem.core.expiring_map import ExpiringMap
from tandem.core.identity import Identity
from tandem.core.tasks import resolve
from tandem.kv_transfer.messages import Seal

if TYPE_CHECKING:
    from tandem.kv_transfer.caches import DeviceEvent

ENDED_KEEP_S = 600.0
"""Minimum seconds for which the reason why a sequence ended is kept, for late calls."""


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """The part of a sequence whose KV is computed.

    Attributes:
        num_tokens: Number of computed tokens.
        pages: Pages of the sequence; later states only append to them.
        generations: Generation of each page when it was added.
        event: Device event after which the entries are written (PagedCaches.record_event).
    """

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    event: "DeviceEvent | None" = None


@dataclass(slots=True, eq=False)
class OpenOffer:
    """An offered sequence.

    Attributes:
        ends_at: Time at which the lease expires, by the clock of the book.
        on_release: Callback of the engine, to be called once the offer has ended.
        seal: None until the KV is complete. Holds the generations of the pages at that time.
    """

    computed: ComputedTokens
    ends_at: float
    on_release: Callable[[], None]
    seal: Seal | None = None

    def has_more_than(self, num_pulled: int) -> bool:
        return self.seal is not None or self.computed.num_tokens > num_pulled


class OfferBook:
    """All offers of a prefill rank. Owned by one asyncio loop.

    An identity is at first unknown, then open with a lease, and finally ended. It may also end
    without having been open.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._open: dict[Identity, OpenOffer] = {}
        keep_s = max(ENDED_KEEP_S, 4 * lease_s)
        self._ended = ExpiringMap[Identity, str](keep_s, clock)
        self._waiters: dict[asyncio.Future[None], Identity] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def open_identities(self) -> list[Identity]:
        return list(self._open)

    def open(self, identity: Identity, on_release: Callable[[], None]) -> bool:
        """Open an offer and start its lease. Return False, without effect, if it ended before."""
        assert identity not in self._open, f"{identity}: its offer was opened twice"
        if identity in self._ended:
            return False
        self._open[identity] = OpenOffer(ComputedTokens(), self._clock() + self.lease_s, on_release)
        self._notify(identity)
        return True

    def get(self, identity: Identity) -> OpenOffer | None:
        """Return the open offer, None if the identity is unknown. Raises SequenceEnded if ended."""
        if identity in self._ended:
            raise SequenceEnded(f"{identity}: {self._ended[identity]}")
        return self._open.get(identity)

    def get_open(self, identity: Identity) -> OpenOffer:
        """Return the open offer. Raises SequenceEnded if the identity is unknown or has ended."""
        entry = self.get(identity)
        if entry is None:
            raise SequenceEnded(f"{identity}: not offered by this prefill rank")
        return entry

    def advance(self, identity: Identity, now: ComputedTokens, seal: Seal | None = None) -> None:
        """Record progress of an offer; ignored if the offer has ended.

        Known pages keep the generation with which they were added. If such a page later gets
        another owner, its new generation differs, and ``check_generations`` fails.

        Args:
            identity: The sequence, which must not be sealed yet.
            now: Computed tokens, and all pages so far.
            seal: Given when the KV is complete; no progress may follow.
        """
        entry = self._open.get(identity)
        if entry is None:
            return
        assert entry.seal is None, f"{identity}: its offer was already sealed"
        before = entry.computed
        num_pages = len(entry.computed.pages)
        assert now.pages[:num_pages] == before.pages, f"{identity}: offered pages were replaced"
        shrank = f"{identity}: computed tokens fell from {before.num_tokens} to {now.num_tokens}"
        assert now.num_tokens >= before.num_tokens, shrank
        generations = before.generations + now.generations[num_pages:]
        entry.computed = replace(now, generations=generations)
        if seal is not None:
            entry.seal = replace(seal, generations=now.generations)
        self._notify(identity)

    def end(self, identity: Identity, reason: str) -> OpenOffer | None:
        """End an identity, even an unknown one. Return its offer if it was open."""
        entry = self._open.pop(identity, None)
        self._ended.add(identity, reason)
        self._notify(identity)
        return entry

    def sweep(self) -> dict[Identity, OpenOffer]:
        """End offers whose lease has expired and return them. Forget those that ended long ago."""
        now = self._clock()
        self._ended.sweep()
        expired = {key: entry for key, entry in self._open.items() if entry.ends_at <= now}
        for identity in expired:
            self.end(identity, f"the lease of {self.lease_s} s expired")
        return expired

    def renew(self, identity: Identity) -> None:
        """Restart the lease of an offer; no effect on an unknown identity.

        Raises SequenceEnded if the offer has ended or its lease has expired.
        """
        entry = self.get(identity)
        if entry is None:
            return
        if entry.ends_at <= self._clock():
            raise SequenceEnded(f"{identity}: the lease of {self.lease_s} s expired")
        entry.ends_at = self._clock() + self.lease_s

    async def wait(self, identity: Identity, num_pulled: int, wait_s: float) -> OpenOffer | None:
        """Wait until an offer is sealed or has more than ``num_pulled`` tokens, and return it.

        After ``wait_s`` seconds return the offer in its present state, or None if it is unknown.

        Raises:
            SequenceEnded: The offer has ended, or ends during the wait.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_s
        while True:
            entry = self.get(identity)
            remaining_s = give_up_at - loop.time()
            if remaining_s <= 0 or (entry is not None and entry.has_more_than(num_pulled)):
                return entry
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters[waiter] = identity
            try:
                await asyncio.wait([waiter], timeout=remaining_s)
            finally:
                del self._waiters[waiter]

    def _notify(self, identity: Identity) -> None:
        for waiter, awaited in self._waiters.items():
            if awaited == identity:
                resolve(waiter, None)
