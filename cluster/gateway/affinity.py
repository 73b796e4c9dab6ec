"""Where prompts that begin alike were sent: a bounded memory, a hint and no more."""

from collections import OrderedDict
from collections.abc import Sequence

from tandem.core.prefixes import prefix_digests

STRIDE = 64
"""Beginnings are remembered at multiples of this many tokens."""
MAX_KEYS = 100_000
MAX_RANKS = 8
"""That one beginning is remembered of, the latest."""


class PrefixAffinity:
    """Owned by one gateway's asyncio loop."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._ranks: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._max_keys = max_keys

    def find(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Prefill ranks that were sent a beginning of ``token_ids``, and the tokens of the longest
        that each was sent."""
        found: dict[str, int] = {}
        for i, key in enumerate(prefix_digests(token_ids, STRIDE)):
            if key not in self._ranks:
                break
            found |= dict.fromkeys(self._ranks[key], (i + 1) * STRIDE)
        return found

    def remember(self, token_ids: Sequence[int], rank: str) -> None:
        for key in prefix_digests(token_ids, STRIDE):
            others = (one for one in self._ranks.get(key, ()) if one != rank)
            self._ranks[key] = (rank, *others)[:MAX_RANKS]
            self._ranks.move_to_end(key)
        while len(self._ranks) > self._max_keys:
            self._ranks.popitem(last=False)
