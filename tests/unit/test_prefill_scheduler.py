"""Prompts wait for pages in order. No prompt waits indefinitely, and no page leaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.core.errors import HandoverError
from tandem.core.identity import Identity
from tandem.core.request import Request, SamplingParams
from tandem.core.turns import NEW_REQUEST_SHARE, is_new_turn
from tandem.kv_transfer.pages import PagePool
from tandem.prefill_node.page_source import DecodeRowPages, PageSource
from tandem.prefill_node.scheduler import SHORT_PROMPT_SHARE, Scheduler
from tandem.prefill_node.sequence import PrefillSequence

SIZE, BUDGET = 4, 7


def request(prompt: tuple[int, ...], output: tuple[int, ...] = ()) -> Request:
    return Request("r", prompt, output, SamplingParams(seed=0), is_resumed=bool(output))


def compute(scheduler: Scheduler, first_token: int = 5) -> None:
    for chunk in scheduler.next_chunks():
        scheduler.advance(chunk, first_token if chunk.is_last else None)


def tokens(num: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + num))


def admit(scheduler: Scheduler, num: int, *output: int) -> PrefillSequence:
    """Admit a prompt of ``num`` tokens that shares no prefix with another."""
    start = 1000 * (len(scheduler.sequences) + 1)
    return scheduler.admit(Identity("r"), request(tokens(num, start), output))


def test_prompts_wait_for_pages_in_order_and_begun_ones_first() -> None:
    scheduler = Scheduler(PageSource(PagePool(6, SIZE)), 100)
    first = admit(scheduler, 12)
    wide = admit(scheduler, 13)
    narrow = admit(scheduler, 1)
    begun = admit(scheduler, 15, 7)
    assert first.pages and not (wide.pages or narrow.pages or begun.pages)
    assert (scheduler.num_waiting, scheduler.num_queued) == (1, 3)
    compute(scheduler)
    assert not scheduler.next_chunks(), "computed, yet without pages"
    scheduler.drop(first.identity)
    assert len(begun.pages) == 4 and not wide.pages and not narrow.pages, "nobody passes"
    scheduler.drop(begun.identity)
    assert len(wide.pages) == 4 and len(narrow.pages) == 1
    assert scheduler.num_queued == 0


def test_one_place_in_so_many_is_for_a_prompt_that_has_not_begun() -> None:
    scheduler = Scheduler(PageSource(PagePool(5, SIZE)), 100)
    holds = admit(scheduler, 16)
    fresh = [admit(scheduler, 16) for _ in range(2)]
    for _ in range(2 * NEW_REQUEST_SHARE):
        admit(scheduler, 15, 7)
    placed = []
    while scheduler.num_queued:
        scheduler.drop(holds.identity)
        [holds] = [one for one in scheduler.sequences.values() if one.pages]
        placed.append(holds in fresh)
    turns = [False] * (NEW_REQUEST_SHARE - 1) + [True]
    assert placed == turns * 2 + [False] * 2


def test_who_gives_up_in_the_queue_lets_the_next_through() -> None:
    scheduler = Scheduler(PageSource(PagePool(6, SIZE)), 100)
    first, wide, narrow = (admit(scheduler, num) for num in (12, 16, 4))
    scheduler.drop(wide.identity)
    assert narrow.pages and scheduler.num_queued == 0
    for one in (first, narrow, wide):
        scheduler.drop(one.identity)
    assert not scheduler.sequences and scheduler.num_waiting == 0


def test_what_can_never_fit_or_is_here_is_refused_and_leaves_nothing() -> None:
    pool = PagePool(4, SIZE)
    scheduler = Scheduler(PageSource(pool), 100)
    with pytest.raises(ValueError, match="prompt: needs 4 pages, but this rank has 3"):
        admit(scheduler, 13)
    one = admit(scheduler, 12)
    with pytest.raises(HandoverError, match="is already on this prefill rank"):
        scheduler.admit(one.identity, one.request)
    scheduler.drop(one.identity)
    assert pool.num_free == pool.num_pages - 1 and not scheduler.sequences


class Traffic(RuleBasedStateMachine):
    """Prompts with shared prefixes are admitted, computed in pieces and dropped in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, SIZE)
        self.scheduler = Scheduler(self.source(), BUDGET)
        self.begun: list[PrefillSequence] = []
        self.fresh: list[PrefillSequence] = []
        self.num_begun = 0

    def source(self) -> PageSource:
        return PageSource(self.pool)

    @rule(
        shared=st.integers(0, 28),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        is_resumed=st.booleans(),
    )
    def admit(self, shared: int, own: list[int], is_resumed: bool) -> None:
        asked = request((*range(100, 100 + shared), *own), (3,) if is_resumed else ())
        sequence = self.scheduler.admit(Identity("r"), asked)
        (self.begun if is_resumed else self.fresh).append(sequence)

    def next_queue(self) -> list[PrefillSequence]:
        is_fresh = is_new_turn(self.num_begun, bool(self.begun), bool(self.fresh))
        return self.fresh if is_fresh else self.begun

    @rule()
    def step(self) -> None:
        before = self.scheduler.num_waiting
        chunks = self.scheduler.next_chunks()
        assert bool(chunks) == bool(before)
        assert sum(chunk.num_tokens for chunk in chunks) <= BUDGET
        if chunks:
            first, share = self.scheduler._waiting[0], BUDGET - BUDGET // SHORT_PROMPT_SHARE
            assert chunks[0].sequence is first, "the first is passed"
            assert chunks[0].num_tokens >= min(first.num_left, share)
        for chunk in chunks:
            self.scheduler.advance(chunk, 5 if chunk.is_last else None)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(number=st.integers(0, 99))
    def drop(self, number: int) -> None:
        sequences = list(self.scheduler.sequences.values())
        gone = sequences[number % len(sequences)]
        self.scheduler.drop(gone.identity)
        for queue in (self.begun, self.fresh):
            if gone in queue:
                queue.remove(gone)

    @invariant()
    def placed_in_order(self) -> None:
        while (queue := self.next_queue()) and queue[0].pages:
            self.num_begun = 0 if queue is self.fresh else self.num_begun + 1
            placed = queue.pop(0)
            assert placed.num_cached < len(placed.token_ids) and placed.num_cached % SIZE == 0
        assert not any(one.pages for one in (*self.begun, *self.fresh)), "somebody was passed"
        assert self.scheduler.num_queued == len(self.begun) + len(self.fresh)
        if queue:
            num_pages = self.pool.num_pages_for(len(queue[0].token_ids))
            assert num_pages > self.pool.num_available, "there was room for the first"

    @invariant()
    def sound(self) -> None:
        self.scheduler.check_integrity()
        held = {page for s in self.scheduler.sequences.values() for page in s.pages}
        assert self.pool.num_available == self.pool.num_pages - 1 - len(held)

    def teardown(self) -> None:
        """Compute the remaining prompts; each must complete as soon as those before it are
        dropped."""
        while self.scheduler.sequences:
            while self.scheduler.num_waiting:
                self.step()
            done = [s for s in self.scheduler.sequences.values() if s.pages]
            assert done and not any(s.num_left for s in done), "somebody starves"
            self.scheduler.drop(done[0].identity)
            self.placed_in_order()
            self.sound()
        self.pool.reclaim(self.pool.num_pages)
        assert self.pool.num_free == self.pool.num_pages - 1


class Rows(dict[Identity, tuple[int, ...]]):
    """Pages that each row of a decode scheduler holds."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__()
        self._pool = pool

    def pages_of(self, identity: Identity) -> tuple[int, ...]:
        if identity not in self:
            raise HandoverError(f"{identity} has no row here")
        return self[identity]

    def use_prefix_pages(self, identity: Identity, known: list[int]) -> tuple[int, ...]:
        pages = self.pages_of(identity)
        self._pool.release(pages[: len(known)])
        self[identity] = (*known, *pages[len(known) :])
        return self[identity]


class AdoptingTraffic(RuleBasedStateMachine):
    """Prompts computed in the pages of decode rows; row and prompt end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(30, SIZE)
        self.rows = Rows(self.pool)
        self.scheduler = Scheduler(
            DecodeRowPages(self.pool, 1, self.rows.pages_of, self.rows.use_prefix_pages), BUDGET
        )

    @rule(shared=st.integers(0, 12), own=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def admit(self, shared: int, own: list[int]) -> None:
        asked = request((*range(100, 100 + shared), *own))
        num_pages = self.pool.num_pages_for(len(asked.prompt_ids)) + 1
        if num_pages > self.pool.num_available:
            return
        identity = Identity("r")
        before = self.rows[identity] = tuple(self.pool.allocate(num_pages))
        sequence = self.scheduler.admit(identity, asked)
        row = self.rows[identity]
        num_known = sequence.num_cached // SIZE
        assert tuple(sequence.pages) == row[:-1] and row[num_known:] == before[num_known:]
        assert not set(before[:num_known]) & set(row), "known pages take their place"

    @rule()
    def step(self) -> None:
        compute(self.scheduler)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(number=st.integers(0, 99))
    def drop_prompt(self, number: int) -> None:
        identities = list(self.scheduler.sequences)
        self.scheduler.drop(identities[number % len(identities)])

    @precondition(lambda self: self.rows)
    @rule(number=st.integers(0, 99))
    def drop_row(self, number: int) -> None:
        identity = list(self.rows)[number % len(self.rows)]
        self.pool.release(self.rows.pop(identity))

    @invariant()
    def sound(self) -> None:
        self.scheduler.check_integrity()
        prompts = [sequence.pages for sequence in self.scheduler.sequences.values()]
        held = {page for pages in (*prompts, *self.rows.values()) for page in pages}
        assert self.pool.num_available == self.pool.num_pages - 1 - len(held)
        assert self.scheduler.num_queued == 0

    def teardown(self) -> None:
        while self.rows:
            self.drop_row(0)
        while self.scheduler.sequences:
            self.drop_prompt(0)
        self.sound()
        self.pool.reclaim(self.pool.num_pages)
        assert self.pool.num_free == self.pool.num_pages - 1


TestTraffic, TestAdoptingTraffic = Traffic.TestCase, AdoptingTraffic.TestCase
for case in (TestTraffic, TestAdoptingTraffic):
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_prompt_is_computed_in_its_rows_pages() -> None:
    pool = PagePool(20, SIZE)
    rows = Rows(pool)
    scheduler = Scheduler(DecodeRowPages(pool, 1, rows.pages_of, rows.use_prefix_pages), 100)
    a, b = Identity("a"), Identity("b")
    rows[a], rows[b] = tuple(pool.allocate(5)), tuple(pool.allocate(5))
    scheduler.admit(a, request(tokens(14)))
    compute(scheduler)
    scheduler.drop(a)
    assert pool.num_available == 9, "the row keeps its pages"
    own = rows[b]
    again = scheduler.admit(b, request(tokens(14)))
    assert (again.num_cached, again.num_left) == (12, 2)
    assert rows[b] == rows[a][:3] + own[3:] and tuple(again.pages) == rows[b][:4]
    assert pool.num_available == 12, "what the known pages replaced is free again"
    for identity in (b, a):
        pool.release(rows.pop(identity))
    assert pool.num_available == 15, "the prompt still holds what it writes to"
    scheduler.drop(b)
    pool.check_integrity()
    assert pool.num_available == 19


def test_a_prompt_without_a_row_is_refused_and_leaves_nothing() -> None:
    pool = PagePool(20, SIZE)
    rows = Rows(pool)
    scheduler = Scheduler(DecodeRowPages(pool, 1, rows.pages_of, rows.use_prefix_pages), 100)
    with pytest.raises(HandoverError, match="has no row here"):
        scheduler.admit(Identity("a"), request(tokens(5)))
    assert (
        not scheduler.sequences
        and scheduler.num_queued == 0
        and pool.num_free == pool.num_pages - 1
    )


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_a_prompt_ends_in_a_chunk_of_as_many_tokens_as_entries_depend_on(
    lengths: list[int], budget: int, least: int
) -> None:
    """The last chunk has at least ``least`` tokens, or all that remain. Cached prefixes and
    concurrent prompts do not change this. A step exceeds the budget only by the end of a prompt."""
    pool = PagePool(200, SIZE)
    scheduler = Scheduler(PageSource(pool, lag=least), budget, least)
    for twice in range(2):
        admitted = [
            scheduler.admit(Identity(f"{twice}-{i}"), request(tokens(num, 1000 * i)))
            for i, num in enumerate(lengths)
        ]
        starts = {one.identity: one.num_computed for one in admitted}
        while chunks := scheduler.next_chunks():
            assert all(chunk.num_tokens > 0 for chunk in chunks)
            assert sum(chunk.num_tokens for chunk in chunks) < budget + least
            for chunk in chunks:
                if chunk.is_last:
                    rest = len(chunk.sequence.token_ids) - starts[chunk.sequence.identity]
                    assert chunk.num_tokens >= min(least, rest)
                    assert rest >= min(least, len(chunk.sequence.token_ids))
                scheduler.advance(chunk, 5 if chunk.is_last else None)
        for one in admitted:
            scheduler.drop(one.identity)
    scheduler.check_integrity()
