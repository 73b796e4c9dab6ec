"""Prefix cache: keeps computed prompt pages for later prompts with the same prefix. Plain Python.

The key of a page covers every token up to the end of the page, and the later tokens on which its
cache entries depend. For example, the MTP entry of the page's last token also depends on the next
token. The page can therefore be reused only if the same token follows.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from tandem.core.prefixes import prefix_digests
from tandem.kv_transfer.pages import PagePool

PageKey = tuple[bytes, tuple[int, ...]]


class PrefixCache:
    """Maps token prefixes to computed pages and holds one reference to each page.

    When the pool needs pages, the cache gives up pages that have no other reference, least recently
    used first. ``lag`` is the number of later tokens on which a cache entry depends.
    """

    def __init__(self, pool: PagePool, lag: int = 1) -> None:
        self._pool, self._lag = pool, max(1, lag)
        self._pages: OrderedDict[PageKey, int] = OrderedDict()
        pool.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._pages)

    def acquire(self, token_ids: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix, with one reference each for the caller.

        The prefix never includes the last token. That token must be computed again, because the
        cache keeps no hidden states, and the first output token is sampled from the last one. For
        this reason a page's key always covers at least one token after the page.
        """
        known = list(takewhile(self._pages.__contains__, self.keys(token_ids)))
        pages = [self._pages[key] for key in known]
        self._pool.retain(pages)
        self._touch(known)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Add the full pages of a computed sequence.

        ``token_ids`` are the computed tokens and the one token after them. A prefix that is already
        cached keeps its page.
        """
        keys = list(self.keys(token_ids))
        for key, page in zip(keys, pages, strict=False):
            if key not in self._pages:
                self._pool.add_cache_ref(page)
                self._pages[key] = page
        self._touch(keys)

    def evict(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Remove the pages of a sequence from the cache, because their contents may be wrong."""
        for key, page in zip(self.keys(token_ids), pages, strict=False):
            if self._pages.get(key) == page:
                self._pool.drop_cache_ref(self._pages.pop(key))

    def _reclaim(self, num_pages: int) -> None:
        """Release up to ``num_pages`` pages without other references, least recently used first."""
        idle = (key for key, page in self._pages.items() if self._pool.refcount(page) == 1)
        for key in list(islice(idle, num_pages)):
            self._pool.drop_cache_ref(self._pages.pop(key))

    def keys(self, token_ids: Sequence[int]) -> Iterator[PageKey]:
        """Yield the keys of the full pages whose next ``lag`` tokens are known, in page order."""
        page_size = self._pool.page_size
        lag = self._lag
        ends = range(page_size, len(token_ids) - lag + 1, page_size)
        later = (tuple(token_ids[end : end + lag]) for end in ends)
        return zip(prefix_digests(token_ids, page_size), later, strict=False)

    def _touch(self, keys: list[PageKey]) -> None:
        """Mark the pages of ``keys``, which are in page order, as most recently used.

        An earlier page counts as more recently used than a later one. The earlier page is useful
        without the later one, but not the reverse.
        """
        for key in reversed(keys):
            self._pages.move_to_end(key)
