"""Gateway sessions of a decode rank, with the sequences that each of them holds.

A gateway renews its session by heartbeats. An expired session loses its sequences. Plain Python,
owned by one thread.
"""

from collections.abc import Callable

from tandem.core.identity import Identity


class Sessions:
    """Sessions by their number. A session expires if it is not renewed for ``lease_s`` seconds."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._renewed_at: dict[int, float] = {}
        self._owners: dict[Identity, int] = {}

    def __len__(self) -> int:
        """Return the number of sequences of all sessions."""
        return len(self._owners)

    def renew(self, session: int) -> None:
        """Renew a session, or create it."""
        self._renewed_at[session] = self._clock()

    def add(self, session: int, identity: Identity) -> None:
        """Add a sequence to a session, which also renews the session."""
        self.renew(session)
        self._owners[identity] = session

    def release(self, identity: Identity) -> None:
        """Remove a sequence that has ended. Unknown sequences are ignored."""
        self._owners.pop(identity, None)

    def session_of(self, identity: Identity) -> int | None:
        return self._owners.get(identity)

    def sequences_of(self, session: int) -> tuple[Identity, ...]:
        return tuple(identity for identity, owner in self._owners.items() if owner == session)

    def sweep(self) -> list[Identity]:
        """Remove expired sessions and return their sequences, which the caller must drop."""
        horizon = self._clock() - self._lease_s
        ended = [session for session, at in self._renewed_at.items() if at <= horizon]
        orphans = [identity for session in ended for identity in self.sequences_of(session)]
        for session in ended:
            del self._renewed_at[session]
        for identity in orphans:
            del self._owners[identity]
        return orphans

    def check_integrity(self) -> None:
        assert set(self._owners.values()) <= self._renewed_at.keys(), (
            "an ended session still owns sequences"
        )
