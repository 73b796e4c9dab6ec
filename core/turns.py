"""Queues that serve resumed answers first but keep a share of turns for new requests."""

from typing import Generic, TypeVar

from tandem.core.identity import Identity

NEW_REQUEST_SHARE = 4
"""Number of turns of which one goes to the oldest new request, even if resumed answers wait."""
Item = TypeVar("Item")


def is_new_turn(num_resumed: int, has_resumed: bool, has_new: bool) -> bool:
    """Return whether the next turn belongs to a new request.

    Args:
        num_resumed: Turns of resumed answers since the last turn of a new request.
        has_resumed: Whether a resumed answer waits.
        has_new: Whether a new request waits.
    """
    return has_new and (not has_resumed or num_resumed >= NEW_REQUEST_SHARE - 1)


class TurnQueue(Generic[Item]):
    """Waiting items by identity, in two kinds: resumed and new, each first in, first out.

    An item is resumed if its client already has tokens of the answer.
    """

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
        """Remove the item that ``peek`` returns, which ends its turn."""
        kind = self._next_kind()
        self._num_resumed = 0 if kind is self.new else self._num_resumed + 1
        del kind[next(iter(kind))]

    def discard(self, identity: Identity) -> None:
        """Remove an item that no longer waits, if it is in the queue."""
        self.resumed.pop(identity, None)
        self.new.pop(identity, None)

    def _next_kind(self) -> dict[Identity, Item]:
        is_new = is_new_turn(self._num_resumed, bool(self.resumed), bool(self.new))
        return self.new if is_new else self.resumed
