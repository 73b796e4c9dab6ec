"""Whose sequences a decode rank holds: gateways renew theirs by heartbeat, or lose them.

Plain Python, owned by one thread (design.md, Leases on decode).
"""

from collections.abc import Callable

from tandem.core.identity import Identity


class Sessions:
    """Sessions by nonce. One that is not renewed for ``lease_s`` loses what it holds."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._renewed_at: dict[int, float] = {}
        self._owners: dict[Identity, int] = {}

    def __len__(self) -> int:
        """Sequences held, of all sessions."""
        return len(self._owners)

    def renew(self, session: int) -> None:
        """A sign of life; the first one begins the session."""
        self._renewed_at[session] = self._clock()

    def add(self, session: int, identity: Identity) -> None:
        """The session asks for something, which is a sign of life too."""
        self.renew(session)
        self._owners[identity] = session

    def release(self, identity: Identity) -> None:
        """The sequence has ended; an unknown one is left alone."""
        self._owners.pop(identity, None)

    def session_of(self, identity: Identity) -> int | None:
        return self._owners.get(identity)

    def sequences_of(self, session: int) -> tuple[Identity, ...]:
        return tuple(identity for identity, owner in self._owners.items() if owner == session)

    def sweep(self) -> list[Identity]:
        """End the sessions that were not renewed; what they held, to be dropped."""
        horizon = self._clock() - self._lease_s
        ended = [session for session, at in self._renewed_at.items() if at <= horizon]
        orphans = [identity for session in ended for identity in self.sequences_of(session)]
        for session in ended:
            del self._renewed_at[session]
        for identity in orphans:
            del self._owners[identity]
        return orphans

    def check_integrity(self) -> None:
        assert set(self._owners.values()) <= self._renewed_at.keys(), "an ended session owns"
