"""Queues in which begun answers go first and fresh requests still get their share of turns."""

from typing import Generic, TypeVar

from tandem.core.identity import Identity

NEW_REQUEST_SHARE = 4
"""One turn in this many goes to the oldest fresh request, however many begun answers wait."""
Item = TypeVar("Item")


def is_new_turn(num_resumed: int, has_resumed: bool, has_new: bool) -> bool:
    """Return whether the next turn belongs to a fresh request.

    Args:
        num_begun: Number of turns that begun answers had since the last turn of a fresh request.
        has_begun: Whether a begun answer waits.
        has_fresh: Whether a fresh request waits.
    """
    return has_new and (not has_resumed or num_resumed >= NEW_REQUEST_SHARE - 1)


class TurnQueue(Generic[Item]):
    """Waiting items by identity. An item is begun if its client has tokens of the answer already,
    otherwise it is fresh; among equals the oldest comes first."""

    def __init__(self) -> None:
        self.resumed: dict[Identity, Item] = {}
        self.new: dict[Identity, Item] = {}
        self._num_resumed = 0

    def __len__(self) -> int:
        return len(self.resumed) + len(self.new)

    def add(self, identity: Identity, item: Item, is_resumed: bool) -> None:
        """Append ``item`` to the items of its kind."""
        (self.resumed if is_resumed else self.new)[identity] = item

    def peek(self) -> tuple[Identity, Item] | None:
        """Return the item whose turn is next, None if the queue is empty."""
        return next(iter(self._next_kind().items()), None)

    def pop(self) -> None:
        """Remove the item that ``peek`` returns: it has had its turn."""
        kind = self._next_kind()
        self._num_resumed = 0 if kind is self.new else self._num_resumed + 1
        del kind[next(iter(kind))]

    def discard(self, identity: Identity) -> None:
        """Remove an item that gave up waiting, if it is in the queue."""
        self.resumed.pop(identity, None)
        self.new.pop(identity, None)

    def _next_kind(self) -> dict[Identity, Item]:
        is_new = is_new_turn(self._num_resumed, bool(self.resumed), bool(self.new))
        return self.new if is_new else self.resumed
