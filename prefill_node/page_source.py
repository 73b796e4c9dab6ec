"""Sources of the pages of prompts: the rank's pool, or the decode rows of the same process."""

from collections.abc import Callable, Sequence

from tandem.core.identity import Identity
from tandem.kv_transfer.pages import PagePool
from tandem.prefill_node.prefix_cache import PrefixCache

PagesOf = Callable[[Identity], tuple[int, ...]]
UsePrefixPages = Callable[[Identity, Sequence[int]], tuple[int, ...]]


class PageSource:
    """Allocates a prompt's pages: cached pages from the prefix cache, the others from the pool.

    Used on the engine thread only, like the pool. ``lag`` is the number of later tokens on which a
    cache entry depends.
    """

    def __init__(self, pool: PagePool, lag: int = 1) -> None:
        self.pool = pool
        self.prefixes = PrefixCache(pool, lag)

    def check_fits(self, identity: Identity, num_tokens: int) -> None:
        """Check that pages for ``num_tokens`` tokens can be allocated once enough pages are free.

        Raises:
            ValueError: The prompt needs more pages than the pool has.
            HandoverError: The sequence no longer holds a decode row (only DecodeRowPages).
        """
        num_pages = self.pool.num_pages_for(num_tokens)
        max_pages = self.pool.num_pages - 1
        if num_pages > max_pages:
            raise ValueError(
                f"prompt: needs {num_pages} pages, but this rank has {max_pages}; shorten it or "
                "raise kv.num_pages"
            )

    def allocate(
        self, identity: Identity, token_ids: Sequence[int]
    ) -> tuple[list[int], int] | None:
        """Allocate pages for ``token_ids``. The caller gets one reference to each page.

        Returns:
            The pages, and the number of leading pages that came from the prefix cache. None if too
                few pages are free.
        """
        known = self.prefixes.acquire(token_ids)
        num_own = self.pool.num_pages_for(len(token_ids)) - len(known)
        if num_own > self.pool.num_available:
            self.pool.release(known)
            return None
        return known + self.pool.allocate(num_own), len(known)


class DecodeRowPages(PageSource):
    """Uses the pages that sequences hold for decoding, if prefill and decode share a process.

    A prompt is computed in the pages in which it is decoded, so nothing is copied. ``pages_of``
    returns the pages of a sequence's decode row. It raises HandoverError if the sequence holds no
    row. ``use_prefix_pages`` replaces the first pages of the row by pages from the prefix cache. It
    takes over one reference to each of them, releases the replaced pages, and returns all pages of
    the row.

    Prefill and the row hold separate references, so neither frees a page that the other still
    needs.
    """

    def __init__(
        self, pool: PagePool, lag: int, pages_of: PagesOf, use_prefix_pages: UsePrefixPages
    ) -> None:
        super().__init__(pool, lag)
        self._pages_of = pages_of
        self._use_prefix_pages = use_prefix_pages

    def check_fits(self, identity: Identity, num_tokens: int) -> None:
        num_held = len(self._pages_of(identity))
        num_pages = self.pool.num_pages_for(num_tokens)
        assert num_held >= num_pages, f"{identity}: {num_pages} pages needed, {num_held} held"

    def allocate(self, identity: Identity, token_ids: Sequence[int]) -> tuple[list[int], int]:
        known = self.prefixes.acquire(token_ids)
        row = self._use_prefix_pages(identity, known)
        pages = list(row[: self.pool.num_pages_for(len(token_ids))])
        self.pool.retain(pages)
        return pages, len(known)
