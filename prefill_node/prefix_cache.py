"""Computed prompt pages kept for the next prompt that begins alike. Plain Python.

A page's key covers every token up to its end and as many after it as cache entries depend on: the
MTP entry of its last slot pairs that slot's hidden state with the next token, so a page is only
right with both.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from tandem.core.prefixes import prefix_digests
from tandem.kv_transfer.pages import PagePool

PageKey = tuple[bytes, tuple[int, ...]]


class PrefixCache:
    """Holds one reference on each page it knows; least recently used pages go first.

    It keeps them in its pool: those nobody else holds are given back when others need them. Cache
    entries depend on ``lag`` later tokens.
    """

    def __init__(self, pool: PagePool, lag: int = 1) -> None:
        self._pool, self._lag = pool, max(1, lag)
        self._pages: OrderedDict[PageKey, int] = OrderedDict()
        pool.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._pages)

    def acquire(self, token_ids: Sequence[int]) -> list[int]:
        """Pages of the longest known beginning, with a reference each for the caller.

        At least the last token is left to compute: its hidden state is not kept, so the key of a
        page covers a token after it in any case.
        """
        known = list(takewhile(self._pages.__contains__, self.keys(token_ids)))
        pages = [self._pages[key] for key in known]
        self._pool.retain(pages)
        self._touch(known)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the full pages of a computed sequence; ``token_ids`` ends with the token that
        follows what was computed. A beginning known already keeps its first page."""
        keys = list(self.keys(token_ids))
        for key, page in zip(keys, pages, strict=False):
            if key not in self._pages:
                self._pool.add_cache_ref(page)
                self._pages[key] = page
        self._touch(keys)

    def evict(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Give up the pages of a sequence that are known: what they hold is not to be trusted."""
        for key, page in zip(self.keys(token_ids), pages, strict=False):
            if self._pages.get(key) == page:
                self._pool.drop_cache_ref(self._pages.pop(key))

    def _reclaim(self, num_pages: int) -> None:
        """Give back up to ``num_pages`` pages, least recently used first."""
        idle = (key for key, page in self._pages.items() if self._pool.refcount(page) == 1)
        for key in list(islice(idle, num_pages)):
            self._pool.drop_cache_ref(self._pages.pop(key))

    def keys(self, token_ids: Sequence[int]) -> Iterator[PageKey]:
        """Of the full pages whose next ``lag`` tokens are in ``token_ids``, first page first."""
        page_size, lag = self._pool.page_size, self._lag
        ends = range(page_size, len(token_ids) - lag + 1, page_size)
        later = (tuple(token_ids[end : end + lag]) for end in ends)
        return zip(prefix_digests(token_ids, page_size), later, strict=False)

    def _touch(self, keys: list[PageKey]) -> None:
        """Newest last, a beginning after what follows it: it is of use without that."""
        for key in reversed(keys):
            self._pages.move_to_end(key)
