"""Allocation of KV pages: reference counts, and generations that reveal stale references."""

from collections.abc import Callable, Iterable, Sequence

from tandem.core.errors import StalePages
from tandem.core.pages import DUMMY_PAGE


class PagePool:
    """Pool of the pages 1 to ``num_pages - 1``, with ``page_size`` tokens each.

    Owned by one thread; any thread may check generations. The generation of a page changes when the
    page is allocated and when it is freed. A generation that was recorded while a page was
    allocated is therefore valid exactly until the page is freed.

    The prefix cache (prefill_node/prefix_cache.py) may hold a reference to a page. A page without
    any other reference is idle. When free pages run out, the pool calls ``reclaim(num_pages)``. The
    prefix cache then drops its references to up to ``num_pages`` idle pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"kv.num_pages={num_pages}: use at least 2, because page 0 is a dummy")
        if page_size < 1:
            raise ValueError(f"kv.page_size={page_size}: use at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reclaim: Callable[[int], None] = lambda num_pages: None
        # The page freed last is reused first, because the system has already backed its memory.
        self._free = list(range(num_pages - 1, 0, -1))
        self._refcounts = [0] * num_pages
        self._generations = [0] * num_pages
        self._cached: set[int] = set()
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of free and idle pages."""
        return len(self._free) + self._num_idle

    @property
    def max_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    @property
    def num_free_tokens(self) -> int:
        return self.num_available * self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages with one reference each. ``num_pages`` must not exceed num_available."""
        if num_pages > len(self._free):
            self.reclaim(num_pages - len(self._free))
        assert 0 <= num_pages <= len(self._free), (
            f"need {num_pages} pages, but {len(self._free)} are free"
        )
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._refcounts[page] = 1
            self._generations[page] += 1
        return pages

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each of the allocated ``pages``."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} is free and cannot be retained"
            self._num_idle -= self._is_idle(page)
            self._refcounts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. Dropping the last frees it and ends its generation."""
        for page in pages:
            assert self._refcounts[page] > 0, f"page {page} was freed twice"
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._generations[page] += 1
                self._free.append(page)
            self._num_idle += self._is_idle(page)

    def add_cache_ref(self, page: int) -> None:
        """Add the prefix cache's reference to an allocated page, at most one per page."""
        assert page not in self._cached, f"the prefix cache already has a reference to page {page}"
        self.retain([page])
        self._cached.add(page)

    def drop_cache_ref(self, page: int) -> None:
        self._num_idle -= self._is_idle(page)
        self._cached.remove(page)
        self.release([page])

    def _is_idle(self, page: int) -> bool:
        return self._refcounts[page] == 1 and page in self._cached

    def generations(self, pages: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._generations[page] for page in pages)

    def check_generations(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        """Raise StalePages if a page was freed after its generation was recorded."""
        for page, generation in zip(pages, generations, strict=True):
            now = self._generations[page]
            if now != generation:
                raise StalePages(
                    f"page {page} was freed: its generation changed from {generation} to {now}"
                )

    def check_integrity(self) -> None:
        """Assert that every page is either free or allocated, and the dummy page neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert DUMMY_PAGE not in free, "the dummy page is free"
        assert self._refcounts[DUMMY_PAGE] == 0, "the dummy page has references"
        idle = sum(map(self._is_idle, self._cached))
        assert self._num_idle == idle, f"counted {self._num_idle} idle pages, but there are {idle}"
        for page in range(1, self.num_pages):
            count = self._refcounts[page]
            assert (count == 0) == (page in free), (
                f"page {page}: {count} references contradict the free list"
            )
            assert count >= 0, f"page {page} has {count} references"
            odd = self._generations[page] % 2 == 1
            assert odd == (count > 0), (
                f"page {page}: its generation must be odd while it has references"
            )
