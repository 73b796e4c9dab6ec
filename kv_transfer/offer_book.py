"""P's book of offered sequences: how far each is computed, its lease, and who waits for it."""

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
"""How long an ended identity is known, so that late calls get its reason and not silence."""


@dataclass(frozen=True, slots=True)
class ComputedPrefix:
    """What there is of a sequence. Pages only ever grow; their ``generations`` are those they came
    with. ``mark`` is the device's (PagedCaches.mark)."""

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    event: "DeviceEvent | None" = None


@dataclass(slots=True, eq=False)
class OpenOffer:
    """An open sequence, leased until ``ends_at``; ``on_release`` is to be called when it ends.
    Its seal holds the generations that its pages had when the engine told of them last."""

    computed: ComputedPrefix
    ends_at: float
    on_release: Callable[[], None]
    seal: Seal | None = None

    def has_more_than(self, num_pulled: int) -> bool:
        return self.seal is not None or self.computed.num_tokens > num_pulled


class OfferBook:
    """Owned by one asyncio loop. An identity is unknown, then open and leased, then ended for
    good; it may end before it was open."""

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
        """Start an identity and its lease. False if it ended before: nothing is kept then."""
        assert identity not in self._open, f"{identity} was opened twice"
        if identity in self._ended:
            return False
        self._open[identity] = OpenOffer(ComputedPrefix(), self._clock() + self.lease_s, on_release)
        self._notify(identity)
        return True

    def get(self, identity: Identity) -> OpenOffer | None:
        """The open entry, None while unknown. Raises SequenceEnded once ended."""
        if identity in self._ended:
            raise SequenceEnded(f"{identity}: {self._ended[identity]}")
        return self._open.get(identity)

    def get_open(self, identity: Identity) -> OpenOffer:
        """The open entry. Raises SequenceEnded for anything else."""
        entry = self.get(identity)
        if entry is None:
            raise SequenceEnded(f"{identity}: not offered here")
        return entry

    def advance(self, identity: Identity, now: ComputedPrefix, seal: Seal | None = None) -> None:
        """A later state of an entry, which its ``seal`` closes; what has ended stays ended.
        A page keeps the generation it came with: that of another owner of it must never look
        right."""
        entry = self._open.get(identity)
        if entry is None:
            return
        assert entry.seal is None, f"{identity} was sealed before"
        before, num_pages = entry.computed, len(entry.computed.pages)
        assert now.pages[:num_pages] == before.pages, f"{identity}: pages were exchanged"
        shrank = f"{identity}: {before.num_tokens} tokens shrank to {now.num_tokens}"
        assert now.num_tokens >= before.num_tokens, shrank
        generations = before.generations + now.generations[num_pages:]
        entry.computed = replace(now, generations=generations)
        if seal is not None:
            entry.seal = replace(seal, generations=now.generations)
        self._notify(identity)

    def end(self, identity: Identity, reason: str) -> OpenOffer | None:
        """End an identity, known or not; its entry if it was open."""
        entry = self._open.pop(identity, None)
        self._ended.add(identity, reason)
        self._notify(identity)
        return entry

    def sweep(self) -> dict[Identity, OpenOffer]:
        """End what expired and return it; forget what ended long ago."""
        now = self._clock()
        self._ended.sweep()
        expired = {key: entry for key, entry in self._open.items() if entry.ends_at <= now}
        for identity in expired:
            self.end(identity, f"its lease of {self.lease_s} s expired")
        return expired

    def renew(self, identity: Identity) -> None:
        """Start the lease anew; one not opened yet needs none. Raises SequenceEnded for what has
        ended, or ran out unswept."""
        entry = self.get(identity)
        if entry is None:
            return
        if entry.ends_at <= self._clock():
            raise SequenceEnded(f"{identity}: its lease of {self.lease_s} s ran out")
        entry.ends_at = self._clock() + self.lease_s

    async def wait(self, identity: Identity, num_pulled: int, wait_s: float) -> OpenOffer | None:
        """The entry as soon as it has more than ``num_pulled``, else as it is after ``wait_s``.

        None if it is still unknown then. Raises SequenceEnded when it ends meanwhile.
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
