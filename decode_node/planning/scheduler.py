"""Admission, batch selection and preemption of a decode rank. Plain Python."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.draft_shapes import DraftShapes, num_slots_ahead
from tandem.core.errors import HandoverError, Overloaded
from tandem.core.identity import Identity
from tandem.core.request import Request
from tandem.core.stopping import remaining_budget, stop_ids
from tandem.core.turns import TurnQueue
from tandem.decode_node.planning.states import (
    NUM_ISOLATED_STEPS,
    GrantedSequence,
    RequestLimits,
    RequestSize,
    RunningSequence,
)
from tandem.kv_transfer.pages import PagePool

MAX_WAITING = 4096
"""Maximum number of new requests that wait for a grant. Resumed requests are never refused."""


class Scheduler:
    """Owns the rows of a decode rank and its sequences in all states. Pages come from ``pool``.

    Requests are granted a row and pages in arrival order, but resumed requests go before new ones.
    One grant in NEW_REQUEST_SHARE always goes to a new request (core/turns.py). A request that
    needs many pages is never overtaken.

    Pages are allocated as sequences grow, two steps ahead. When the pool is full, the youngest
    running sequence is preempted. It can resume from (prompt_ids, output_ids) without loss. A
    request whose whole output fits the pool can always finish, if necessary alone.
    """

    def __init__(
        self,
        pool: PagePool,
        max_rows: int,
        draft_shapes: DraftShapes,
        max_model_len: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._pool = pool
        self._max_depth = draft_shapes[-1].depth
        self._num_ahead = num_slots_ahead(draft_shapes)
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self.queue = TurnQueue[RequestLimits]()
        """Requests that wait for a row and pages, new and resumed."""
        self.sequences: dict[Identity, GrantedSequence | RunningSequence] = {}
        """Sequences that hold rows, in the order of their grants."""
        self._running_by_row: list[RunningSequence | None] = [None] * max_rows
        self._ending: set[RunningSequence] = set()

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> list[RunningSequence]:
        return [
            sequence
            for sequence in self.sequences.values()
            if isinstance(sequence, RunningSequence)
        ]

    def enqueue(self, identity: Identity, size: RequestSize) -> None:
        """Add a request to the queue for a row and pages, which ``grant`` serves.

        Raises:
            ValueError: Prompt and maximum output need more pages than the pool has.
            Overloaded: The request is new and MAX_WAITING new requests wait already.
        """
        budget = remaining_budget(
            num_prompt=size.num_prompt,
            num_output=size.num_output,
            max_tokens=size.max_tokens,
            max_model_len=self._max_model_len,
        )
        num_tokens = size.num_prompt + size.num_output
        max_pages = self._pool.num_pages - 1
        limits = RequestLimits(size, self._num_pages(num_tokens + budget), size.num_output + budget)
        if limits.max_pages > max_pages:
            raise ValueError(
                f"max_tokens: prompt and answer need {limits.max_pages} pages, but this rank has "
                f"{max_pages}; lower max_tokens or raise kv.num_pages"
            )
        if not size.is_resumed and len(self.queue.new) >= MAX_WAITING:
            raise Overloaded(f"{len(self.queue.new)} requests already wait for a decode row")
        assert identity not in self.sequences, f"{identity} already has a decode row"
        self.queue.add(identity, limits, size.is_resumed)

    def grant(self) -> list[Identity]:
        """Assign rows and pages to waiting requests, in turn, and return the granted ones."""
        granted = []
        while self._free_rows and (first := self.queue.peek()):
            identity, limits = first
            num_tokens = limits.size.num_prompt + limits.size.num_output + 1
            num_pages = min(limits.max_pages, self._num_pages(num_tokens))
            if num_pages + self._num_reserved_pages() > self._pool.num_available:
                break
            self.queue.pop()
            row = self._free_rows.pop()
            pages = tuple(self._pool.allocate(num_pages))
            self.sequences[identity] = GrantedSequence(
                identity=identity, row=row, pages=pages, limits=limits
            )
            granted.append(identity)
        return granted

    def get_grant(self, identity: Identity) -> GrantedSequence:
        """Return the grant of ``identity``. Raises HandoverError if there is none."""
        granted = self.sequences.get(identity)
        if not isinstance(granted, GrantedSequence):
            raise HandoverError(f"{identity} has no decode row: it was aborted or never got one")
        return granted

    def use_prefix_pages(self, identity: Identity, known: Sequence[int]) -> tuple[int, ...]:
        """Replace the first granted pages by the prefix-cache pages ``known``; return all pages.

        The caller's reference to each known page passes to the grant. The replaced pages go back to
        the pool.
        """
        granted = self.get_grant(identity)
        self._pool.release(granted.pages[: len(known)])
        pages = (*known, *granted.pages[len(known) :])
        self.sequences[identity] = replace(granted, pages=pages)
        return pages

    def build_running(
        self, identity: Identity, request: Request, is_suspect: bool = False
    ) -> RunningSequence:
        """Build the running state of a granted request whose KV cache and first token arrived.

        Raises HandoverError if the request holds no grant.
        """
        granted = self.get_grant(identity)
        max_depth = self._max_depth
        max_drafts = request.speculation.max_drafts
        return RunningSequence(
            identity=identity,
            row=granted.row,
            pages=list(granted.pages),
            limits=granted.limits,
            num_output=granted.limits.size.num_output + 1,
            request=request,
            stop_ids=stop_ids(request.sampling, self._eos_ids),
            draft_limit=max_depth if max_drafts is None else min(max_drafts, max_depth),
            max_depth=max_depth,
            num_isolated_steps=NUM_ISOLATED_STEPS if is_suspect else 0,
        )

    def start_steps(self, sequence: RunningSequence) -> None:
        """Make ``sequence`` eligible for steps."""
        self.sequences[sequence.identity] = self._running_by_row[sequence.row] = sequence

    def drop(self, identity: Identity) -> bool:
        """End a sequence, or its wait for a row; return whether it held a row.

        Row and pages are freed once no step in flight may access them.
        """
        self.queue.discard(identity)
        sequence = self.sequences.pop(identity, None)
        if sequence is None:
            return False
        self._running_by_row[sequence.row] = None
        if isinstance(sequence, RunningSequence) and sequence.num_in_flight:
            self._ending.add(sequence)
        else:
            self._release(sequence)
        return True

    def are_running(self, sequences: Sequence[RunningSequence]) -> list[bool]:
        """Return for each sequence whether it has not ended."""
        return [self._running_by_row[sequence.row] is sequence for sequence in sequences]

    @property
    def has_running(self) -> bool:
        return any(self._running_by_row)

    def on_launch(self, sequences: Sequence[RunningSequence]) -> None:
        """Record that a step of ``sequences`` was launched."""
        for sequence in sequences:
            sequence.num_in_flight += 1

    def on_complete(self, sequences: Sequence[RunningSequence]) -> None:
        """Record that a step of ``sequences`` has completed; free the rows of ended sequences."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
            if sequence in self._ending and not sequence.num_in_flight:
                self._ending.remove(sequence)
                self._release(sequence)

    def _release(self, sequence: GrantedSequence | RunningSequence) -> None:
        self._pool.release(sequence.pages)
        self._free_rows.append(sequence.row)

    def must_preempt(self) -> bool:
        """Return whether ``grow_or_preempt`` would have to preempt a sequence."""
        return self._exceeds_free_pages(self._short_of_pages())

    def grow_or_preempt(self) -> list[RunningSequence]:
        """Allocate pages for the next two steps of every running sequence, oldest first.

        If pages run out, the youngest sequences are preempted. Returns the preempted sequences,
        which are already dropped.
        """
        preempted: list[RunningSequence] = []
        short = self._short_of_pages()
        waiting = self.running if self._exceeds_free_pages(short) else short
        while waiting:
            sequence = waiting[0]
            missing = self._num_missing_pages(sequence)
            if missing <= self._pool.num_available:
                sequence.pages += self._pool.allocate(missing)
                waiting.pop(0)
                continue
            victim = waiting.pop()
            self.drop(victim.identity)
            preempted.append(victim)
        return preempted

    def has_suspects(self) -> bool:
        """Return whether some running sequence must run its steps alone."""
        return any(s is not None and s.num_isolated_steps for s in self._running_by_row)

    def runnable(self, is_suspects_turn: bool = False) -> list[RunningSequence]:
        """Return the sequences of the next step.

        Each step emits at least one token per sequence. Sequences that the steps in flight will
        certainly finish are therefore left out. The result is either the oldest suspect alone or
        all other sequences, by row. If both exist, the suspect runs if ``is_suspects_turn``.
        """
        left = [s for s in self._running_by_row if s and s.num_in_flight < s.num_output_left]
        others = [s for s in left if not s.num_isolated_steps]
        if len(others) < len(left) and (is_suspects_turn or not others):
            return [s for s in self.running if s.num_isolated_steps and s in left][:1]
        return others

    def _exceeds_free_pages(self, sequences: list[RunningSequence]) -> bool:
        return sum(map(self._num_missing_pages, sequences)) > self._pool.num_available

    def _short_of_pages(self) -> list[RunningSequence]:
        """Return the running sequences that need more pages. Kept cheap: every step calls it."""
        size = self._pool.page_size
        running = filter(None, self._running_by_row)
        short = [s for s in running if s.num_known + self._num_ahead > len(s.pages) * size]
        return [s for s in short if len(s.pages) < s.limits.max_pages]

    def _num_reserved_pages(self) -> int:
        """Return the number of pages that grants leave free: one per sequence that may grow."""
        return sum(s.limits.max_pages > len(s.pages) for s in self.sequences.values())

    def _num_missing_pages(self, sequence: RunningSequence) -> int:
        num_wanted = min(self._num_pages(sequence.num_known), sequence.limits.max_pages)
        return max(0, num_wanted - len(sequence.pages))

    def _num_pages(self, num_tokens: int) -> int:
        """Return the number of pages needed for ``num_tokens`` known tokens and two more steps."""
        return self._pool.num_pages_for(num_tokens + self._num_ahead)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        owners = [*self.sequences.values(), *self._ending]
        rows = self._free_rows + [s.row for s in owners]
        assert sorted(rows) == list(range(len(self._running_by_row))), (
            f"each row must be free or have one owner, got rows {rows}"
        )
        assert all(s.num_in_flight for s in self._ending), (
            "an ended sequence without a step in flight keeps its row"
        )
        owned = [p for s in owners for p in s.pages if self._pool.refcount(p) == 1]
        assert len(owned) == len(set(owned)), "two sequences own the same page"
        assert {*self.running} == {*filter(None, self._running_by_row)}, (
            "the rows do not match the running sequences"
        )
        assert not self.sequences.keys() & {*self.queue.resumed, *self.queue.new}, (
            "a sequence that has a row is still in the queue"
        )
