"""The prefix cache: right pages only, bounded by the pool, nothing lost whatever the order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import Overloaded
from core.request import Request, SamplingParams
from kv_transfer.pages import PagePool
from prefill_node.prefix_cache import PrefixCache, page_keys
from prefill_node.scheduler import SHORT_SHARE, Scheduler

SIZE = 4


def request(name: str, ids: tuple[int, ...]) -> Request:
    return Request(name, ids, sampling=SamplingParams(seed=0))


def finish(scheduler: Scheduler, first_token: int = 99) -> None:
    while chunks := scheduler.next_chunks():
        for chunk in chunks:
            scheduler.advance(chunk, first_token if chunk.is_last else None)


def test_a_key_covers_the_page_and_the_token_after_it() -> None:
    base = list(page_keys([1, 2, 3, 4, 5, 6, 7, 8, 9], SIZE))
    assert len(base) == 2
    assert list(page_keys([1, 2, 3, 4, 5, 6, 7, 8], SIZE)) == base[:1]
    assert list(page_keys([1, 2, 3, 4, 0, 6, 7, 8, 9], SIZE))[0] != base[0]
    assert list(page_keys([0, 2, 3, 4, 5, 6, 7, 8, 9], SIZE))[1] != base[1]
    other_next = list(page_keys([1, 2, 3, 4, 5, 6, 7, 8, 0], SIZE))
    assert other_next[0] == base[0] and other_next[1] != base[1]


def test_an_equal_beginning_is_not_computed_twice() -> None:
    pool = PagePool(20, SIZE)
    scheduler = Scheduler(pool, 100)
    ids = tuple(range(1, 14))
    first = scheduler.admit(request("a", ids), 0)
    finish(scheduler)
    second = scheduler.admit(request("b", (*ids[:9], 50, 51)), 0)
    assert second.num_cached == second.num_done == 8
    assert second.pages[:2] == first.pages[:2] and second.pages[2] not in first.pages
    [chunk] = scheduler.next_chunks()
    assert (chunk.lo, chunk.hi) == (8, 11)
    diverging = scheduler.admit(request("c", (*ids[:8], 50, 51)), 0)
    assert diverging.num_cached == 4, "the second page was followed by another token"
    whole = scheduler.admit(request("d", ids[:8]), 0)
    assert whole.num_cached == 4, "the last token is always computed"


def test_the_answer_extends_what_is_known() -> None:
    """A page that ends with the prompt is published once the first token is known."""
    scheduler = Scheduler(PagePool(20, SIZE), 100)
    scheduler.admit(request("a", (1, 2, 3, 4)), 0)
    finish(scheduler, first_token=7)
    assert scheduler.admit(request("b", (1, 2, 3, 4, 7, 8)), 0).num_cached == 4
    assert scheduler.admit(request("c", (1, 2, 3, 4, 6, 8)), 0).num_cached == 0


def test_cached_pages_give_way_to_new_prompts() -> None:
    pool = PagePool(5, SIZE)
    scheduler = Scheduler(pool, 100)
    for name, start in (("a", 10), ("b", 30)):
        scheduler.admit(request(name, tuple(range(start, start + 9))), 0)
        finish(scheduler)
        scheduler.drop((name, 0))
        scheduler.check_integrity()
    assert pool.num_available == 4
    scheduler.admit(request("c", tuple(range(50, 66))), 0)
    with pytest.raises(Overloaded):
        scheduler.admit(request("d", (1,)), 0)
    scheduler.drop(("c", 0))
    assert pool.num_available == 4


@pytest.mark.parametrize("budget", [8, 64, 256])
def test_a_short_prompt_does_not_wait_for_a_long_one(budget: int) -> None:
    scheduler = Scheduler(PagePool(2000, SIZE), budget)
    scheduler.admit(request("long", tuple(range(4000))), 0)
    short = tuple(range(9000, 9000 + budget // SHORT_SHARE))
    scheduler.admit(request("short", short), 0)
    chunks = scheduler.next_chunks()
    assert [c.sequence.request.request_id for c in chunks] == ["long", "short"]
    assert chunks[1].is_last and sum(c.num_tokens for c in chunks) <= budget


def test_a_short_prompt_waits_for_no_part_of_a_second_long_one() -> None:
    scheduler = Scheduler(PagePool(4000, SIZE), 64)
    for name in ("long", "longer"):
        scheduler.admit(request(name, tuple(range(4000))), 0)
    scheduler.admit(request("short", tuple(range(9000, 9010))), 0)
    first, second, third = scheduler.next_chunks()
    assert second.sequence.request.request_id == "short" and second.is_last
    assert (first.num_tokens, third.num_tokens) == (48, 6)


class Traffic(RuleBasedStateMachine):
    """Prompts that share beginnings, admitted, computed in pieces and dropped in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, SIZE)
        self.scheduler = Scheduler(self.pool, 7)
        self.number = 0

    @rule(shared=st.integers(0, 12), own=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def admit(self, shared: int, own: list[int]) -> None:
        ids = (*range(100, 100 + shared), *own)
        try:
            sequence = self.scheduler.admit(request(f"r{self.number}", ids), 0)
            assert sequence.num_cached < len(ids) and sequence.num_cached % SIZE == 0
        except Overloaded:
            assert self.pool.num_pages_for(len(ids)) > self.pool.num_available
        self.number += 1

    @rule()
    def step(self) -> None:
        before = self.scheduler.num_waiting
        chunks = self.scheduler.next_chunks()
        assert bool(chunks) == bool(before)
        assert sum(chunk.num_tokens for chunk in chunks) <= 7
        if chunks:
            first, share = self.scheduler._waiting[0], 7 - 7 // SHORT_SHARE
            assert chunks[0].sequence is self.scheduler.sequences[first], "the first is passed"
            assert chunks[0].num_tokens >= min(chunks[0].sequence.num_left, share)
        for chunk in chunks:
            self.scheduler.advance(chunk, 5 if chunk.is_last else None)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        self.scheduler.drop(key)

    @invariant()
    def sound(self) -> None:
        self.scheduler.check_integrity()
        held = {page for s in self.scheduler.sequences.values() for page in s.pages}
        assert self.pool.num_available == self.pool.num_pages - 1 - len(held)

    def teardown(self) -> None:
        while self.scheduler.next_chunks():
            self.step()
        for key in list(self.scheduler.sequences):
            self.scheduler.drop(key)
        self.sound()
        self.scheduler.prefixes.clear()
        assert self.pool.num_used == 0


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_cache_is_its_pools_reclaimer() -> None:
    pool = PagePool(4, SIZE)
    cache = PrefixCache(pool)
    pages = pool.allocate(3)
    cache.publish(tuple(range(13)), pages)
    pool.release(pages)
    assert (len(cache), pool.num_free, pool.num_available) == (3, 0, 3)
    assert len(pool.allocate(2)) == 2
    assert len(cache) == 1, "the beginning is kept longest"
    assert cache.take(tuple(range(13))) == pages[:1]
