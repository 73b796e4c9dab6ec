"""Where a prompt's pages come from: the rank's pool, or a decode row of the same process."""

from collections.abc import Callable, Sequence

from tandem.core.identity import Identity
from tandem.kv_transfer.pages import PagePool
from tandem.prefill_node.prefix_cache import PrefixCache

PagesOf = Callable[[Identity], tuple[int, ...]]
UsePrefixPages = Callable[[Identity, Sequence[int]], tuple[int, ...]]


class PageSource:
    """From the pool, behind what the prefix cache knows. Owned by the engine thread, like the pool.
    ``prefixes`` are what is known; cache entries depend on ``lag`` later tokens."""

    def __init__(self, pool: PagePool, lag: int = 1) -> None:
        self.pool = pool
        self.prefixes = PrefixCache(pool, lag)

    def check_fits(self, identity: Identity, num_tokens: int) -> None:
        """Raises ValueError for what can never be placed, HandoverError for what is gone."""
        num_pages, max_pages = self.pool.num_pages_for(num_tokens), self.pool.num_pages - 1
        if num_pages > max_pages:
            raise ValueError(
                f"prompt: needs {num_pages} pages of this node's {max_pages}; shorten it or raise "
                "kv.num_pages"
            )

    def allocate(
        self, identity: Identity, token_ids: Sequence[int]
    ) -> tuple[list[int], int] | None:
        """Pages for all of ``token_ids`` with a reference each for the caller, and how many of
        the first are known already; None while too few are free."""
        known = self.prefixes.acquire(token_ids)
        num_own = self.pool.num_pages_for(len(token_ids)) - len(known)
        if num_own > self.pool.num_available:
            self.pool.release(known)
            return None
        return known + self.pool.allocate(num_own), len(known)


class DecodeRowPages(PageSource):
    """Pages that decode rows of this process hold: a prompt is computed where it is decoded.

    ``pages_of`` tells a row's, and raises HandoverError when there is no such row. Known pages take
    the place of a row's first ones there (``use_prefix_pages``: they come with a reference each,
    what they replace goes back to the pool, the row's pages are returned): nothing is copied. The
    caller's references are its own, so neither frees a page that the other still needs.
    """

    def __init__(
        self, pool: PagePool, lag: int, pages_of: PagesOf, use_prefix_pages: UsePrefixPages
    ) -> None:
        super().__init__(pool, lag)
        self._pages_of, self._use_prefix_pages = pages_of, use_prefix_pages

    def check_fits(self, identity: Identity, num_tokens: int) -> None:
        num_held, num_pages = len(self._pages_of(identity)), self.pool.num_pages_for(num_tokens)
        assert num_held >= num_pages, f"{identity}: {num_pages} pages needed, {num_held} held"

    def allocate(self, identity: Identity, token_ids: Sequence[int]) -> tuple[list[int], int]:
        known = self.prefixes.acquire(token_ids)
        row = self._use_prefix_pages(identity, known)
        pages = list(row[: self.pool.num_pages_for(len(token_ids))])
        self.pool.retain(pages)
        return pages, len(known)
