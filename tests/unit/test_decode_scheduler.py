"""Random lives of a decode rank: its books never break, a page in flight is never given away,
and every request that was admitted comes to its end, whatever the pool makes it wait for.

A rank is played as by its two loops: at most one step is unread when the next is launched.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import Overloaded
from core.request import Request, SamplingParams, Speculation
from decode_node.scheduler import Scheduler
from decode_node.sequence import Sequence
from kv_transfer.pages import PagePool

PAGE_SIZE, MAX_DRAFTS = 4, 3


def ask(name: str, num_prompt: int, max_tokens: int, max_drafts: int | None = None) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    prompt = tuple(range(num_prompt))
    return Request(name, prompt, sampling=sampling, speculation=Speculation(max_drafts))


@dataclass
class Played:
    """A scheduler with steps on their way; a turn leaves ``num_left`` of them unread: none in the
    plain loop, one in the overlapped."""

    scheduler: Scheduler
    num_left: int = 0
    in_flight: deque[tuple[Sequence, ...]] = field(default_factory=deque)
    preempted: list[Sequence] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def activate(self, name: str) -> None:
        sequence = self.scheduler.sequences[name]
        sequence.num_output += 1
        sequence.active = True
        if sequence.num_output >= sequence.max_output:
            self.scheduler.drop(name)
            self.finished.append(name)

    def launch(self) -> None:
        if self.scheduler.must_preempt():
            while self.in_flight:
                self.land(random.Random(0))
        self.preempted += self.scheduler.make_room()
        assert not any(s.num_in_flight for s in self.preempted[-1:]), "it had more to tell"
        sequences = self.scheduler.runnable()
        for sequence in sequences:
            sequence.num_last_drafts = sequence.limit
            room = len(sequence.pages) * PAGE_SIZE
            most = len(sequence.request.prompt_ids) + sequence.max_output
            assert room >= min(sequence.num_known_most + sequence.limit, most)
        self.scheduler.launched(sequences)
        if sequences:
            self.in_flight.append(tuple(sequences))

    def land(self, luck: random.Random) -> None:
        sequences = self.in_flight.popleft()
        self.scheduler.landed(sequences)
        for sequence in sequences:
            if sequence.ended:
                continue
            sequence.num_output += min(luck.randint(1, sequence.limit + 1), sequence.num_budget)
            if sequence.num_budget == 0 or luck.random() < 0.02:
                self.scheduler.drop(sequence.request.request_id)
                self.finished.append(sequence.request.request_id)

    def step(self, luck: random.Random) -> None:
        num_before = len(self.in_flight)
        self.launch()
        is_idle = len(self.in_flight) == num_before
        while len(self.in_flight) > (0 if is_idle else self.num_left):
            self.land(luck)


class Life(RuleBasedStateMachine):
    """Any order of arrivals, activations, aborts, launches and landings."""

    @initialize(
        num_pages=st.integers(8, 30), max_rows=st.integers(1, 6), luck=st.integers(0, 2**20)
    )
    def begin(self, num_pages: int, max_rows: int, luck: int) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        scheduler = Scheduler(self.pool, max_rows, MAX_DRAFTS, 200, ())
        self.played = Played(scheduler)
        self.luck = random.Random(luck)
        self.num_asked = 0

    @rule(
        shapes=st.lists(
            st.tuples(st.integers(1, 12), st.integers(1, 60), st.integers(0, 3), st.booleans()),
            min_size=1,
            max_size=5,
        )
    )
    def arrive(self, shapes: list[tuple[int, int, int, bool]]) -> None:
        for num_prompt, max_tokens, drafts, runs_at_once in shapes:
            self.num_asked += 1
            request = ask(f"r{self.num_asked}", num_prompt, max_tokens, drafts)
            free_before = self.pool.num_free
            try:
                self.played.scheduler.admit(request)
            except (Overloaded, ValueError):
                assert self.pool.num_free == free_before, "a refusal holds pages"
                continue
            if runs_at_once:
                self.played.activate(request.request_id)

    @rule(pick=st.integers(0, 100))
    def activate(self, pick: int) -> None:
        waiting = [s for s in self.played.scheduler.sequences.values() if not s.active]
        assume(waiting)
        self.played.activate(waiting[pick % len(waiting)].request.request_id)

    @precondition(lambda self: self.num_asked % 3 == 0)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        names = list(self.played.scheduler.sequences)
        assume(names)
        name = names[pick % len(names)]
        assert self.played.scheduler.drop(name) is not None
        assert self.played.scheduler.drop(name) is None

    @precondition(lambda self: len(self.played.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        running = [s for s in self.played.scheduler.sequences.values() if s.active]
        self.played.preempted.clear()
        self.played.launch()
        if running and running[0] in self.played.preempted:
            arriving = [s for s in self.played.scheduler.sequences.values() if not s.active]
            assert arriving, "the oldest made way, though the pages were with younger ones"

    @rule(num_turns=st.integers(1, 8))
    def go_on(self, num_turns: int) -> None:
        for _ in range(num_turns):
            while len(self.played.in_flight) > 1:
                self.played.land(self.luck)
            self.launch()

    @precondition(lambda self: self.played.in_flight)
    @rule()
    def land(self) -> None:
        self.played.land(self.luck)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "played"):
            return
        scheduler = self.played.scheduler
        scheduler.check_integrity()
        moving = {id(s): s for step in self.played.in_flight for s in step}
        for sequence in moving.values():
            assert all(self.pool._refcounts[page] for page in sequence.pages), (
                "a page in flight is free"
            )

    def teardown(self) -> None:
        if not hasattr(self, "played"):
            return
        for name in list(self.played.scheduler.sequences):
            self.played.scheduler.drop(name)
        while self.played.in_flight:
            self.played.land(self.luck)
        self.played.scheduler.check_integrity()
        assert self.pool.num_free == self.pool.num_pages - 1, "pages leaked"


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("num_left", [0, 1])
@settings(max_examples=200, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    num_pages=st.integers(8, 30),
    max_rows=st.integers(1, 6),
    seed=st.integers(0, 2**20),
)
def test_every_request_comes_to_its_end(
    num_left: int, shapes: list[tuple[int, int]], num_pages: int, max_rows: int, seed: int
) -> None:
    """Reservations in turn, the preempted at the end of the line: nobody waits for ever, and
    nobody loses what it has emitted."""
    pool = PagePool(num_pages, PAGE_SIZE)
    played = Played(Scheduler(pool, max_rows, MAX_DRAFTS, 200, ()), num_left)
    luck = random.Random(seed)
    line = deque(ask(f"r{i}", *shape) for i, shape in enumerate(shapes))
    refused = set()
    num_steps_left = 40 * sum(max_tokens for _, max_tokens in shapes) + 100
    emitted: dict[str, int] = {}
    while line or played.scheduler.sequences or played.in_flight:
        num_steps_left -= 1
        assert num_steps_left > 0, f"somebody starves: {list(line)}"
        while line:
            try:
                played.scheduler.admit(line[0])
            except Overloaded:
                break
            except ValueError:
                refused.add(line.popleft().request_id)
                continue
            played.activate(line.popleft().request_id)
        played.step(luck)
        played.scheduler.check_integrity()
        for sequence in played.preempted:
            request = sequence.request
            name = request.request_id
            assert sequence.num_output >= emitted.get(name, 0)
            emitted[name] = sequence.num_output
            given = tuple(range(sequence.num_output))
            again = Request(name, request.prompt_ids, given, request.sampling, request.speculation)
            line.append(again)
        played.preempted.clear()
    assert sorted([*played.finished, *refused]) == sorted(f"r{i}" for i in range(len(shapes)))
    assert pool.num_free == pool.num_pages - 1
