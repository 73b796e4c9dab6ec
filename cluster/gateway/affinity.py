"""Prefix affinity: the prefill ranks that recently received each prompt prefix. Only a hint."""

from collections import OrderedDict
from collections.abc import Sequence

from tandem.core.prefixes import prefix_digests

STRIDE = 64
"""Prefixes are recorded at multiples of this number of tokens."""
MAX_KEYS = 100_000
MAX_RANKS = 8
"""Maximum ranks recorded per prefix; the most recent ones are kept."""


class PrefixAffinity:
    """Bounded LRU map from prompt prefixes to prefill ranks.

    Owned by one gateway's asyncio loop.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._ranks: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._max_keys = max_keys

    def find(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Return the prefill ranks that received a prefix of ``token_ids``.

        The values are the numbers of tokens of the longest prefix that each rank received.
        """
        found: dict[str, int] = {}
        for i, key in enumerate(prefix_digests(token_ids, STRIDE)):
            if key not in self._ranks:
                break
            found |= dict.fromkeys(self._ranks[key], (i + 1) * STRIDE)
        return found

    def remember(self, token_ids: Sequence[int], rank: str) -> None:
        """Record that ``rank`` receives ``token_ids``."""
        for key in prefix_digests(token_ids, STRIDE):
            others = (other for other in self._ranks.get(key, ()) if other != rank)
            self._ranks[key] = (rank, *others)[:MAX_RANKS]
            self._ranks.move_to_end(key)
        while len(self._ranks) > self._max_keys:
            self._ranks.popitem(last=False)
