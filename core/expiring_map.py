"""A mapping whose entries expire, without a scan of the entries that stay."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ExpiringMap(Generic[Key, Value]):
    """Values by key, each kept for at least ``keep_s`` seconds by ``clock``.

    The first value of a key stays. Entries are in insertion order, so ``sweep`` visits only those
    that it removes.
    """

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._entries: dict[Key, tuple[Value, float]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key][0]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Key, value: Value) -> None:
        """Store ``value`` unless ``key`` already has one."""
        self._entries.setdefault(key, (value, self._clock()))

    def sweep(self) -> None:
        """Remove entries that were added more than ``keep_s`` seconds ago."""
        horizon = self._clock() - self._keep_s
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key][1] >= horizon:
                return
            del self._entries[key]
