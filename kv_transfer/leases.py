"""Promises that expire: offered KV stays until its lease is released or runs out."""

import time
from collections.abc import Callable

Key = tuple[str, int]
"""(request id, attempt)."""


class LeaseTable:
    """Leases of ``lease_s`` seconds by key. Plain state; the owner calls it from one thread."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        if lease_s <= 0:
            raise ValueError(f"kv_transfer.lease_s must be positive, got {lease_s}")
        self.lease_s = lease_s
        self._clock = clock
        self._ends_at: dict[Key, float] = {}

    def __len__(self) -> int:
        return len(self._ends_at)

    def __contains__(self, key: Key) -> bool:
        return key in self._ends_at

    def keys(self) -> set[Key]:
        return set(self._ends_at)

    def grant(self, key: Key) -> None:
        """Start a lease; a key has at most one."""
        assert key not in self._ends_at, f"{key} has a lease already"
        self._ends_at[key] = self._clock() + self.lease_s

    def renew(self, key: Key) -> bool:
        """Start the time anew. False if there is no such lease, or it ran out unswept."""
        if self._ends_at.get(key, float("-inf")) <= self._clock():
            return False
        self._ends_at[key] = self._clock() + self.lease_s
        return True

    def release(self, key: Key) -> bool:
        """End a lease early. False if there was none (releasing twice is fine)."""
        return self._ends_at.pop(key, None) is not None

    def sweep(self) -> list[Key]:
        """Remove the leases that ran out and return their keys, oldest end first."""
        now = self._clock()
        expired = sorted((end, key) for key, end in self._ends_at.items() if end <= now)
        for _, key in expired:
            del self._ends_at[key]
        return [key for _, key in expired]
