"""Computed prompt pages kept for the next prompt that begins alike. Plain Python.

A page's key covers every token up to its end and the one after it: the draft entry of its last
slot pairs that slot's hidden state with the next token, so a page is only right with both.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kv_transfer.pages import PagePool

PageKey = bytes


def page_keys(token_ids: Sequence[int], page_size: int) -> Iterator[PageKey]:
    """Keys of the full pages whose next token is in ``token_ids``, first page first."""
    digest = hashlib.blake2b(digest_size=16)
    for end in range(page_size, len(token_ids), page_size):
        digest.update(_packed(token_ids[end - page_size : end]))
        yield hashlib.blake2b(digest.digest() + _packed(token_ids[end : end + 1])).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


class PrefixCache:
    """Holds one reference on each page it knows; least recently used pages go first.

    It is its pool's reclaimer: pages nobody else holds are given back when others need them.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: OrderedDict[PageKey, int] = OrderedDict()
        pool.reclaimer = self

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
                self._pool.retain([page])
                self._pages[key] = page
        self._touch(keys)

    def num_reclaimable(self) -> int:
        """Pages that only the cache holds."""
        return sum(self._pool.refcount(page) == 1 for page in self._pages.values())

    def reclaim(self, num_pages: int) -> None:
        """Give back up to ``num_pages`` pages, least recently used first."""
        for key in [k for k, page in self._pages.items() if self._pool.refcount(page) == 1]:
            if num_pages <= 0:
                return
            self._pool.release([self._pages.pop(key)])
            num_pages -= 1

    def _keys(self, token_ids: Sequence[int]) -> Iterator[PageKey]:
        return page_keys(token_ids, self._pool.page_size)

    def _touch(self, keys: list[PageKey]) -> None:
        """Newest last, a beginning after what follows it: it is of use without that."""
        for key in reversed(keys):
            self._pages.move_to_end(key)

    def clear(self) -> None:
        """Forget everything; pages others hold stay theirs."""
        self._pool.release(self._pages.values())
        self._pages.clear()
