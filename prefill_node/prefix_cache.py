"""Computed prompt pages kept for the next prompt that begins alike. Plain Python.

A page's key covers every token up to its end and the one after it: the draft entry of its last
slot pairs that slot's hidden state with the next token, so a page is only right with both.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from core.prefixes import prefix_digests
from kv_transfer.pages import PagePool

PageKey = tuple[bytes, int]


def page_keys(token_ids: Sequence[int], page_size: int) -> Iterator[PageKey]:
    """Keys of the full pages whose next token is in ``token_ids``, first page first."""
    return zip(prefix_digests(token_ids, page_size), token_ids[page_size::page_size], strict=False)


class PrefixCache:
    """Holds one reference on each page it knows; least recently used pages go first.

    It keeps them in its pool: those nobody else holds are given back when others need them.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: OrderedDict[PageKey, int] = OrderedDict()
        pool.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._pages)

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Pages of the longest known beginning, with a reference each for the caller.

        At least the last token is left to compute: its hidden state is not kept.
        """
        known = list(takewhile(self._pages.__contains__, self._keys(token_ids)))
        pages = [self._pages[key] for key in known]
        self._pool.retain(pages)
        self._touch(known)
        return pages

    def publish(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the full pages of a computed sequence; ``token_ids`` ends with the token that
        follows what was computed. A beginning known already keeps its first page."""
        keys = list(self._keys(token_ids))
        for key, page in zip(keys, pages, strict=False):
            if key not in self._pages:
                self._pool.keep(page)
                self._pages[key] = page
        self._touch(keys)

    def _reclaim(self, num_pages: int) -> None:
        """Give back up to ``num_pages`` pages, least recently used first."""
        idle = (key for key, page in self._pages.items() if self._pool.refcount(page) == 1)
        for key in list(islice(idle, num_pages)):
            self._pool.unkeep(self._pages.pop(key))

    def _keys(self, token_ids: Sequence[int]) -> Iterator[PageKey]:
        return page_keys(token_ids, self._pool.page_size)

    def _touch(self, keys: list[PageKey]) -> None:
        """Newest last, a beginning after what follows it: it is of use without that."""
        for key in reversed(keys):
            self._pages.move_to_end(key)
