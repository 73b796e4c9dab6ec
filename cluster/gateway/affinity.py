"""Where prompts that begin alike were sent: a bounded memory, a hint and no more."""

from collections import OrderedDict
from collections.abc import Sequence

from core.prefixes import prefix_digests

STRIDE = 64
"""Beginnings are remembered at multiples of this many tokens."""
MAX_KEYS = 100_000


class PrefixAffinity:
    """Owned by one gateway's asyncio loop."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._nodes: OrderedDict[bytes, str] = OrderedDict()
        self._max_keys = max_keys

    def find(self, token_ids: Sequence[int]) -> str | None:
        """The prefill node that was sent the longest beginning of ``token_ids``."""
        found = None
        for key in prefix_digests(token_ids, STRIDE):
            if key not in self._nodes:
                break
            found = self._nodes[key]
        return found

    def remember(self, token_ids: Sequence[int], node: str) -> None:
        for key in prefix_digests(token_ids, STRIDE):
            self._nodes[key] = node
            self._nodes.move_to_end(key)
        while len(self._nodes) > self._max_keys:
            self._nodes.popitem(last=False)
