"""Random operation sequences on a decode rank's scheduler.

Its invariants hold, a page in flight is never reused, and every admitted request finishes, however
long it waits for pages. The test imitates both loops: at most one step is unread when the next is
launched.
"""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.core.draft_shapes import chain_shapes
from tandem.core.errors import HandoverError, Overloaded
from tandem.core.identity import Identity
from tandem.core.request import Request, SamplingParams, Speculation
from tandem.core.turns import NEW_REQUEST_SHARE
from tandem.decode_node.planning.scheduler import Scheduler
from tandem.decode_node.planning.states import GrantedSequence, RequestSize, RunningSequence
from tandem.kv_transfer.pages import PagePool

PAGE_SIZE, MAX_DRAFTS = 4, 3


def request(name: str, num_prompt: int, max_tokens: int, max_drafts: int | None = None) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    prompt = tuple(range(num_prompt))
    return Request(name, prompt, sampling=sampling, speculation=Speculation(max_drafts))


def size_of(asked: Request) -> RequestSize:
    num_output = len(asked.output_ids)
    return RequestSize(len(asked.prompt_ids), num_output, asked.sampling.max_tokens, num_output > 0)


@dataclass
class Played:
    """A scheduler with steps in flight. A turn leaves ``num_left`` of them unread: 0 in the plain
    loop, 1 in the overlapped loop."""

    scheduler: Scheduler
    num_left: int = 0
    in_flight: deque[tuple[RunningSequence, ...]] = field(default_factory=deque)
    preempted: list[RunningSequence] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    asked: dict[Identity, Request] = field(default_factory=dict)

    def ask(self, asked: Request) -> Identity:
        """Queue a new attempt. Raises what ``Scheduler.enqueue`` raises."""
        identity = Identity(asked.request_id)
        self.scheduler.enqueue(identity, size_of(asked))
        self.asked[identity] = asked
        return identity

    def grant(self) -> list[Identity]:
        return self.scheduler.grant()

    def activate(self, identity: Identity) -> None:
        sequence = self.scheduler.build_running(identity, self.asked[identity])
        self.scheduler.start_steps(sequence)
        if sequence.num_output >= sequence.limits.max_output:
            self.scheduler.drop(identity)
            self.finished.append(identity.request_id)

    def launch(self) -> None:
        if self.scheduler.must_preempt():
            while self.in_flight:
                self.land(random.Random(0))
        self.preempted += self.scheduler.grow_or_preempt()
        assert not any(s.num_in_flight for s in self.preempted[-1:]), "it had more to tell"
        sequences = self.scheduler.runnable()
        for sequence in sequences:
            sequence.last_depth = sequence.draft_limit
            room = len(sequence.pages) * PAGE_SIZE
            most = len(sequence.request.prompt_ids) + sequence.limits.max_output
            assert room >= min(sequence.max_num_known + sequence.draft_limit, most)
        self.scheduler.on_launch(sequences)
        if sequences:
            self.in_flight.append(tuple(sequences))

    def land(self, luck: random.Random) -> None:
        sequences = self.in_flight.popleft()
        self.scheduler.on_complete(sequences)
        for sequence in sequences:
            if self.scheduler.are_running([sequence]) == [False]:
                continue
            sequence.num_output += min(
                luck.randint(1, sequence.draft_limit + 1), sequence.num_output_left
            )
            if sequence.num_output_left == 0 or luck.random() < 0.02:
                self.scheduler.drop(sequence.identity)
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
        scheduler = Scheduler(self.pool, max_rows, chain_shapes(MAX_DRAFTS), 200, ())
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
            asked = request(f"r{self.num_asked}", num_prompt, max_tokens, drafts)
            free_before = self.pool.num_free
            try:
                self.played.ask(asked)
            except ValueError:
                assert self.pool.num_free == free_before, "a refusal holds pages"
                continue
            for identity in self.played.grant():
                if runs_at_once:
                    self.played.activate(identity)

    @rule(pick=st.integers(0, 100))
    def activate(self, pick: int) -> None:
        sequences = self.played.scheduler.sequences.values()
        waiting = [s for s in sequences if isinstance(s, GrantedSequence)]
        assume(waiting)
        self.played.activate(waiting[pick % len(waiting)].identity)

    @precondition(lambda self: self.num_asked % 3 == 0)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        scheduler = self.played.scheduler
        queued = [*scheduler.queue.resumed, *scheduler.queue.new]
        anybody = [*scheduler.sequences, *queued]
        assume(anybody)
        identity = anybody[pick % len(anybody)]
        assert scheduler.drop(identity) == (identity not in queued)
        assert not scheduler.drop(identity)
        assert identity not in {
            *scheduler.sequences,
            *scheduler.queue.resumed,
            *scheduler.queue.new,
        }

    @precondition(lambda self: len(self.played.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        running = self.played.scheduler.running
        self.played.preempted.clear()
        self.played.launch()
        if running and running[0] in self.played.preempted:
            sequences = self.played.scheduler.sequences.values()
            arriving = [s for s in sequences if isinstance(s, GrantedSequence)]
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
        scheduler = self.played.scheduler
        for identity in [*scheduler.sequences, *scheduler.queue.resumed, *scheduler.queue.new]:
            scheduler.drop(identity)
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
    """Reservations are made in turn and preempted sequences queue last. No request waits
    indefinitely or loses tokens that it has emitted."""
    pool = PagePool(num_pages, PAGE_SIZE)
    played = Played(Scheduler(pool, max_rows, chain_shapes(MAX_DRAFTS), 200, ()), num_left)
    luck = random.Random(seed)
    line = [request(f"r{i}", *shape) for i, shape in enumerate(shapes)]
    refused = set()
    num_steps_left = 40 * sum(max_tokens for _, max_tokens in shapes) + 100
    emitted: dict[str, int] = {}
    while line or played.scheduler.num_waiting or played.scheduler.sequences or played.in_flight:
        num_steps_left -= 1
        assert num_steps_left > 0, "somebody starves"
        for asked in line:
            try:
                played.ask(asked)
            except ValueError:
                refused.add(asked.request_id)
        line.clear()
        for identity in played.grant():
            played.activate(identity)
        played.step(luck)
        played.scheduler.check_integrity()
        for sequence in played.preempted:
            asked = sequence.request
            name = asked.request_id
            assert sequence.num_output >= emitted.get(name, 0)
            emitted[name] = sequence.num_output
            given = tuple(range(sequence.num_output))
            line.append(replace(asked, output_ids=given))
        played.preempted.clear()
    assert sorted([*played.finished, *refused]) == sorted(f"r{i}" for i in range(len(shapes)))
    assert pool.num_free == pool.num_pages - 1


def test_rows_are_granted_in_turn_and_to_those_that_have_begun_first() -> None:
    scheduler = Scheduler(PagePool(20, PAGE_SIZE), 1, chain_shapes(MAX_DRAFTS), 200, ())
    names = {name: Identity(name) for name in ("runs", "large", "small", "begun")}
    scheduler.enqueue(names["runs"], RequestSize(4, 0, 4))
    assert scheduler.grant() == [names["runs"]]
    scheduler.enqueue(names["large"], RequestSize(40, 0, 4))
    scheduler.enqueue(names["small"], RequestSize(4, 0, 4))
    scheduler.enqueue(names["begun"], RequestSize(20, 7, 20, True))
    for turn in ("begun", "large", "small"):
        assert scheduler.grant() == [], "there is but one row"
        scheduler.drop(next(iter(scheduler.sequences)))
        assert scheduler.grant() == [names[turn]]
    with pytest.raises(HandoverError, match="has no decode row"):
        scheduler.build_running(names["runs"], request("runs", 4, 4))


def test_one_grant_in_so_many_is_for_a_request_that_has_not_begun() -> None:
    """One grant in NEW_REQUEST_SHARE goes to a new request. Its turn is not lost while there are
    too few pages for it."""
    scheduler = Scheduler(PagePool(20, PAGE_SIZE), 2, chain_shapes(MAX_DRAFTS), 200, ())
    fresh, held = Identity("fresh"), Identity("held")
    scheduler.enqueue(held, RequestSize(20, 0, 4))
    assert scheduler.grant() == [held]
    scheduler.enqueue(fresh, RequestSize(60, 0, 4))
    begun = [Identity(f"begun-{i}") for i in range(NEW_REQUEST_SHARE)]
    for identity in begun:
        scheduler.enqueue(identity, RequestSize(4, 1, 4, is_resumed=True))
    for identity in begun[:-1]:
        assert scheduler.grant() == [identity]
        scheduler.drop(identity)
    assert scheduler.grant() == [], "its turn has come, and the pages are taken"
    scheduler.drop(held)
    assert scheduler.grant() == [fresh]
    scheduler.drop(fresh)
    assert scheduler.grant() == begun[-1:]
    scheduler.check_integrity()


def test_tokens_that_a_client_claims_give_no_priority() -> None:
    scheduler = Scheduler(PagePool(20, PAGE_SIZE), 1, chain_shapes(MAX_DRAFTS), 200, ())
    first, claims = Identity("first"), Identity("claims")
    scheduler.enqueue(first, RequestSize(4, 0, 4))
    scheduler.enqueue(claims, RequestSize(4, 3, 4))
    assert scheduler.grant() == [first]


def test_a_full_queue_refuses_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.decode_node.planning.scheduler.MAX_WAITING", 2)
    scheduler = Scheduler(PagePool(20, PAGE_SIZE), 1, chain_shapes(MAX_DRAFTS), 200, ())
    for _ in range(2):
        scheduler.enqueue(Identity("r"), RequestSize(4, 0, 4))
    with pytest.raises(Overloaded):
        scheduler.enqueue(Identity("r"), RequestSize(4, 0, 4))
    scheduler.enqueue(Identity("r"), RequestSize(4, 1, 4, True))
    scheduler.check_integrity()
