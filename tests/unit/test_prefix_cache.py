"""The prefix cache returns only right pages and is bounded by the pool. No order of calls loses a
page."""

import pytest

from tandem.core.identity import Identity
from tandem.core.request import Request, SamplingParams
from tandem.kv_transfer.pages import PagePool
from tandem.prefill_node.page_source import PageSource
from tandem.prefill_node.prefix_cache import PrefixCache
from tandem.prefill_node.scheduler import SHORT_PROMPT_SHARE, Scheduler
from tandem.prefill_node.sequence import PrefillSequence

SIZE = 4


def admit(scheduler: Scheduler, name: str, ids: tuple[int, ...]) -> PrefillSequence:
    return scheduler.admit(Identity(name), Request(name, ids, sampling=SamplingParams(seed=0)))


def finish(scheduler: Scheduler, first_token: int = 99) -> None:
    while chunks := scheduler.next_chunks():
        for chunk in chunks:
            scheduler.advance(chunk, first_token if chunk.is_last else None)


def test_a_key_covers_the_page_and_the_token_after_it() -> None:
    cache = PrefixCache(PagePool(20, SIZE))
    base = list(cache.keys([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert len(base) == 2
    assert list(cache.keys([1, 2, 3, 4, 5, 6, 7, 8])) == base[:1]
    assert list(cache.keys([1, 2, 3, 4, 0, 6, 7, 8, 9]))[0] != base[0]
    assert list(cache.keys([0, 2, 3, 4, 5, 6, 7, 8, 9]))[1] != base[1]
    other_next = list(cache.keys([1, 2, 3, 4, 5, 6, 7, 8, 0]))
    assert other_next[0] == base[0] and other_next[1] != base[1]


def test_an_equal_beginning_is_not_computed_twice() -> None:
    pool = PagePool(20, SIZE)
    scheduler = Scheduler(PageSource(pool), 100)
    ids = tuple(range(1, 14))
    first = admit(scheduler, "a", ids)
    finish(scheduler)
    second = admit(scheduler, "b", (*ids[:9], 50, 51))
    assert second.num_cached == second.num_computed == 8
    assert second.pages[:2] == first.pages[:2] and second.pages[2] not in first.pages
    [chunk] = scheduler.next_chunks()
    assert (chunk.lo, chunk.hi) == (8, 11)
    diverging = admit(scheduler, "c", (*ids[:8], 50, 51))
    assert diverging.num_cached == 4, "the second page was followed by another token"
    whole = admit(scheduler, "d", ids[:8])
    assert whole.num_cached == 4, "the last token is always computed"


def test_the_answer_extends_what_is_known() -> None:
    """A page that ends with the prompt is published once the first token is known."""
    scheduler = Scheduler(PageSource(PagePool(20, SIZE)), 100)
    admit(scheduler, "a", (1, 2, 3, 4))
    finish(scheduler, first_token=7)
    assert admit(scheduler, "b", (1, 2, 3, 4, 7, 8)).num_cached == 4
    assert admit(scheduler, "c", (1, 2, 3, 4, 6, 8)).num_cached == 0


def test_cached_pages_give_way_to_new_prompts() -> None:
    pool = PagePool(5, SIZE)
    scheduler = Scheduler(PageSource(pool), 100)
    for name, start in (("a", 10), ("b", 30)):
        done = admit(scheduler, name, tuple(range(start, start + 9)))
        finish(scheduler)
        scheduler.drop(done.identity)
        scheduler.check_integrity()
    assert pool.num_available == 4
    wide = admit(scheduler, "c", tuple(range(50, 66)))
    assert wide.pages and not admit(scheduler, "d", (1,)).pages
    scheduler.drop(wide.identity)
    assert pool.num_available == 3


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_a_short_prompt_does_not_wait_for_a_long_one(budget: int) -> None:
    scheduler = Scheduler(PageSource(PagePool(2000, SIZE)), budget)
    admit(scheduler, "long", tuple(range(4000)))
    short = tuple(range(9000, 9000 + budget // SHORT_PROMPT_SHARE))
    admit(scheduler, "short", short)
    chunks = scheduler.next_chunks()
    assert [c.sequence.request.request_id for c in chunks] == ["long", "short"]
    assert chunks[1].is_last and sum(c.num_tokens for c in chunks) <= budget


def test_a_short_prompt_waits_for_no_part_of_a_second_long_one() -> None:
    scheduler = Scheduler(PageSource(PagePool(4000, SIZE)), 64)
    for name in ("long", "longer"):
        admit(scheduler, name, tuple(range(4000)))
    admit(scheduler, "short", tuple(range(9000, 9010)))
    first, second, third = scheduler.next_chunks()
    assert second.sequence.request.request_id == "short" and second.is_last
    assert (first.num_tokens, third.num_tokens) == (48, 6)


def test_the_cache_is_its_pools_reclaimer() -> None:
    pool = PagePool(4, SIZE)
    cache = PrefixCache(pool)
    pages = pool.allocate(3)
    cache.insert(tuple(range(13)), pages)
    pool.release(pages)
    assert (len(cache), pool.num_free, pool.num_available) == (3, 0, 3)
    assert len(pool.allocate(2)) == 2
    assert len(cache) == 1, "the beginning is kept longest"
    assert cache.acquire(tuple(range(13))) == pages[:1]
