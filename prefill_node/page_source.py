"""Sources of a prompt's pages: the rank's pool, or a decode row of the same process."""

from collections.abc import Callable, Sequence

from tandem.core.identity import Identity
from tandem.kv_transfer.pages import PagePool
from tandem.prefill_node.prefix_cache import PrefixCache

PagesOf = Callable[[Identity], tuple[int, ...]]
UsePrefixPages = Callable[[Identity, Sequence[int]], tuple[int, ...]]


class PageSource:
    """Allocates a prompt's pages: known pages from the prefix cache, the others from the pool.

    Used on the engine thread only, like the pool. Cache entries depend on ``lag`` later tokens.
    """

    def __init__(self, pool: PagePool, lag: int = 1) -> None:
        self.pool = pool
        self.prefixes = PrefixCache(pool, lag)

    def check_fits(self, identity: Identity, num_tokens: int) -> None:
        """Check that ``num_tokens`` tokens can be allocated once pages are free.

        Raises:
            ValueError: The prompt exceeds the pool.
            HandoverError: The decode row of the sequence is gone (DecodeRowPages).
        """
        num_pages = self.pool.num_pages_for(num_tokens)
        max_pages = self.pool.num_pages - 1
        if num_pages > max_pages:
            raise ValueError(
                f"prompt: needs {num_pages} pages of this node's {max_pages}; shorten it or raise "
                "kv.num_pages"
            )

    def allocate(
        self, identity: Identity, token_ids: Sequence[int]
    ) -> tuple[list[int], int] | None:
        """Allocate pages for ``token_ids``, with a reference each for the caller.

        Returns the pages and the number of leading pages from the prefix cache, or None if too few
        pages are free.
        """
        known = self.prefixes.acquire(token_ids)
        num_own = self.pool.num_pages_for(len(token_ids)) - len(known)
        if num_own > self.pool.num_available:
            self.pool.release(known)
            return None
        return known + self.pool.allocate(num_own), len(known)


class DecodeRowPages(PageSource):
    """Uses the pages of decode rows of this process: a prompt is computed where it is decoded.

    ``pages_of`` returns a row's pages and raises HandoverError if there is no such row.
    ``use_prefix_pages`` replaces a row's first pages by pages from the prefix cache, so nothing is
    copied. It takes over a reference to each, releases the replaced pages and returns all pages.

    Prefill holds references besides the row's, so neither frees a page that the other still needs.
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
