"""Queues in which begun answers go first and fresh requests still get their share of turns."""

from typing import Generic, TypeVar

from tandem.core.identity import Identity

FRESH_SHARE = 4
"""One turn in this many goes to the oldest fresh request, however many begun answers wait."""
Item = TypeVar("Item")


def is_fresh_turn(num_begun: int, has_begun: bool, has_fresh: bool) -> bool:
    """Return whether the next turn belongs to a fresh request.

    Args:
        num_begun: Number of turns that begun answers had since the last turn of a fresh request.
        has_begun: Whether a begun answer waits.
        has_fresh: Whether a fresh request waits.
    """
    return has_fresh and (not has_begun or num_begun >= FRESH_SHARE - 1)


class TurnQueue(Generic[Item]):
    """Waiting items by identity. An item is begun if its client has tokens of the answer already,
    otherwise it is fresh; among equals the oldest comes first."""

    def __init__(self) -> None:
        self.begun: dict[Identity, Item] = {}
        self.fresh: dict[Identity, Item] = {}
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self.begun) + len(self.fresh)

    def add(self, identity: Identity, item: Item, is_begun: bool) -> None:
        """Append ``item`` to the items of its kind."""
        (self.begun if is_begun else self.fresh)[identity] = item

    def peek(self) -> tuple[Identity, Item] | None:
        """Return the item whose turn is next, None if the queue is empty."""
        return next(iter(self._next_kind().items()), None)

    def take(self) -> None:
        """Remove the item that ``peek`` returns: it has had its turn."""
        kind = self._next_kind()
        self._num_begun = 0 if kind is self.fresh else self._num_begun + 1
        del kind[next(iter(kind))]

    def discard(self, identity: Identity) -> None:
        """Remove an item that gave up waiting, if it is in the queue."""
        self.begun.pop(identity, None)
        self.fresh.pop(identity, None)

    def _next_kind(self) -> dict[Identity, Item]:
        is_fresh = is_fresh_turn(self._num_begun, bool(self.begun), bool(self.fresh))
        return self.fresh if is_fresh else self.begun
