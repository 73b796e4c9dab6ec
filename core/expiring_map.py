"""A mapping whose entries expire. Removing expired entries visits no other entry."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ExpiringMap(Generic[Key, Value]):
    """Mapping that keeps each entry for at least ``keep_s`` seconds, as measured by ``clock``.

    A later ``add`` of the same key changes neither its value nor its time. Entries are in insertion
    order, so ``sweep`` visits only those that it removes.
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
