"""Whose sequences a decode rank holds: gateways renew theirs by heartbeat, or lose them.

Plain Python, owned by one thread (design.md, Leases on decode).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from core.identity import Identity


@dataclass(slots=True)
class _Session:
    renewed_at: float
    held: set[Identity] = field(default_factory=set)


class Sessions:
    """Sessions by nonce. One that is not renewed for ``lease_s`` loses what it holds."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._sessions: dict[int, _Session] = {}
        self._owners: dict[Identity, int] = {}

    def __len__(self) -> int:
        """Sequences held, of all sessions."""
        return len(self._owners)

    def renew(self, session: int) -> None:
        """A sign of life; the first one begins the session."""
        now = self._clock()
        self._sessions.setdefault(session, _Session(now)).renewed_at = now

    def hold(self, session: int, identity: Identity) -> None:
        """The session asks for something, which is a sign of life too."""
        self.renew(session)
        self._sessions[session].held.add(identity)
        self._owners[identity] = session

    def let_go(self, identity: Identity) -> None:
        """The sequence has ended; an unknown one is left alone."""
        session = self._owners.pop(identity, None)
        if session is not None and session in self._sessions:
            self._sessions[session].held.discard(identity)

    def owner(self, identity: Identity) -> int | None:
        return self._owners.get(identity)

    def held(self, session: int) -> tuple[Identity, ...]:
        return tuple(self._sessions[session].held) if session in self._sessions else ()

    def sweep(self) -> list[Identity]:
        """End the sessions that were not renewed; what they held, to be dropped."""
        horizon = self._clock() - self._lease_s
        ended = [nonce for nonce, one in self._sessions.items() if one.renewed_at <= horizon]
        orphans = [identity for nonce in ended for identity in self._sessions.pop(nonce).held]
        for identity in orphans:
            del self._owners[identity]
        return orphans

    def check_integrity(self) -> None:
        held = {i: nonce for nonce, one in self._sessions.items() for i in one.held}
        assert held == self._owners, "sessions and owners differ"
