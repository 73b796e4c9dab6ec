"""Who may enter a decode rank, who runs in its next step, who makes way. Plain Python."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.errors import HandoverError, Overloaded
from tandem.core.identity import Identity
from tandem.core.levels import Levels, slots_ahead
from tandem.core.request import Request
from tandem.core.stopping import num_budget, stop_ids
from tandem.core.turns import TurnQueue
from tandem.decode_node.planning.states import NUM_STEPS_ALONE, Granted, Need, Running, Size
from tandem.kv_transfer.pages import PagePool

MAX_WAITING = 4096
"""Requests that wait for a grant; those that have begun are never refused."""


class Scheduler:
    """Owner of row slots and of sequences in each state; pages come from the pool it is given.

    Requests are granted a row and pages first come, first served, begun ones ahead of fresh ones,
    which get one grant in FRESH_SHARE. No request passes one that needs many pages. Pages grow as
    sequences do, two steps ahead. When the pool is full the youngest running sequence is preempted:
    it goes on later from (prompt_ids, output_ids), nothing is lost. A request whose whole answer
    fits the pool can always finish, if need be alone.
    """

    def __init__(
        self,
        pool: PagePool,
        max_rows: int,
        levels: Levels,
        max_model_len: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._pool = pool
        self._most_depth, self._num_ahead = levels[-1].depth, slots_ahead(levels)
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self.queue = TurnQueue[Need]()
        """Requests that wait for a row and pages."""
        self.sequences: dict[Identity, Granted | Running] = {}
        """Those that hold rows, in the order in which these were granted."""
        self._runs: list[Running | None] = [None] * max_rows
        self._ending: set[Running] = set()

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> list[Running]:
        return [one for one in self.sequences.values() if isinstance(one, Running)]

    def ask(self, identity: Identity, size: Size) -> None:
        """Join the queue for a row and pages; ``grant`` tells whose turn has come.

        Raises ValueError when the whole answer can never fit, Overloaded when too many wait.
        """
        budget = num_budget(size.num_prompt, size.num_output, size.max_tokens, self._max_model_len)
        num_tokens, most = size.num_prompt + size.num_output, self._pool.num_pages - 1
        need = Need(size, self._num_pages(num_tokens + budget), size.num_output + budget)
        if need.num_most_pages > most:
            raise ValueError(
                f"max_tokens: prompt and answer need {need.num_most_pages} pages, this node has "
                f"{most}; ask for fewer tokens or raise kv.num_pages"
            )
        if not size.is_begun and len(self.queue.fresh) >= MAX_WAITING:
            raise Overloaded(f"{len(self.queue.fresh)} requests wait for a decode row already")
        assert identity not in self.sequences, f"{identity} was granted already"
        self.queue.add(identity, need, size.is_begun)

    def grant(self) -> list[Identity]:
        """Give rows and pages to those whose turn it is; they hold them from now on."""
        granted = []
        while self._free_rows and (first := self.queue.peek()):
            identity, need = first
            num_tokens = need.size.num_prompt + need.size.num_output + 1
            num_pages = min(need.num_most_pages, self._num_pages(num_tokens))
            if num_pages + self._num_growing() > self._pool.num_available:
                break
            self.queue.take()
            row, pages = self._free_rows.pop(), tuple(self._pool.allocate(num_pages))
            self.sequences[identity] = Granted(identity, row, pages, need)
            granted.append(identity)
        return granted

    def held(self, identity: Identity) -> Granted:
        """Raises HandoverError when it holds no row that waits for it."""
        granted = self.sequences.get(identity)
        if not isinstance(granted, Granted):
            raise HandoverError(f"{identity} holds no row: it was aborted, or never granted one")
        return granted

    def share(self, identity: Identity, known: Sequence[int]) -> tuple[int, ...]:
        """Its pages, of which the first are ``known`` ones now, with a reference each; what they
        replace goes back to the pool."""
        granted = self.held(identity)
        self._pool.release(granted.pages[: len(known)])
        pages = (*known, *granted.pages[len(known) :])
        self.sequences[identity] = replace(granted, pages=pages)
        return pages

    def started(self, identity: Identity, request: Request, is_suspect: bool = False) -> Running:
        """The granted request with its KV and its first token, for ``run``. Raises what ``held``
        raises."""
        granted, most, asked = self.held(identity), self._most_depth, request.speculation.max_drafts
        return Running(
            identity,
            granted.row,
            list(granted.pages),
            granted.need,
            granted.need.size.num_output + 1,
            request,
            stop_ids(request.sampling, self._eos_ids),
            most if asked is None else min(asked, most),
            most,
            num_alone=NUM_STEPS_ALONE if is_suspect else 0,
        )

    def run(self, sequence: Running) -> None:
        """Steps may have it from now on."""
        self.sequences[sequence.identity] = self._runs[sequence.row] = sequence

    def drop(self, identity: Identity) -> bool:
        """End a sequence, or its wait for a row; whether it held one. Row and pages are free once
        no step on its way may touch them."""
        self.queue.discard(identity)
        one = self.sequences.pop(identity, None)
        if one is None:
            return False
        self._runs[one.row] = None
        if isinstance(one, Running) and one.num_in_flight:
            self._ending.add(one)
        else:
            self._release(one)
        return True

    def run_still(self, sequences: Sequence[Running]) -> list[bool]:
        """Whether each has not ended."""
        return [self._runs[one.row] is one for one in sequences]

    @property
    def has_running(self) -> bool:
        return any(self._runs)

    def launched(self, sequences: Sequence[Running]) -> None:
        """A step of ``sequences`` is on its way."""
        for sequence in sequences:
            sequence.num_in_flight += 1

    def landed(self, sequences: Sequence[Running]) -> None:
        """A step of ``sequences`` is through."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
            if sequence in self._ending and not sequence.num_in_flight:
                self._ending.remove(sequence)
                self._release(sequence)

    def _release(self, one: Granted | Running) -> None:
        self._pool.release(one.pages)
        self._free_rows.append(one.row)

    def must_preempt(self) -> bool:
        """Whether ``make_room`` would have to take pages from a sequence."""
        return self._lacks(self._short())

    def make_room(self) -> list[Running]:
        """Give every running sequence pages for its next two steps; who was preempted for it.

        Oldest first; the youngest ones make way. They are dropped already.
        """
        preempted: list[Running] = []
        short = self._short()
        waiting = self.running if self._lacks(short) else short
        while waiting:
            sequence = waiting[0]
            missing = self._num_missing(sequence)
            if missing <= self._pool.num_available:
                sequence.pages += self._pool.allocate(missing)
                waiting.pop(0)
                continue
            victim = waiting.pop()
            self.drop(victim.identity)
            preempted.append(victim)
        return preempted

    def has_suspects(self) -> bool:
        """Whether some sequence has to be alone in its step."""
        return any(s is not None and s.num_alone for s in self._runs)

    def runnable(self, suspects_turn: bool = False) -> list[Running]:
        """Sequences of the next step, by row: those that steps on their way, which give at least a
        token each, do not end for certain. The oldest suspect alone, or all others, whichever
        there are; if both, the suspect on its turn."""
        left = [s for s in self._runs if s and s.num_in_flight < s.num_budget]
        others = [s for s in left if not s.num_alone]
        if len(others) < len(left) and (suspects_turn or not others):
            return [s for s in self.running if s.num_alone and s in left][:1]
        return others

    def _lacks(self, sequences: list[Running]) -> bool:
        return sum(map(self._num_missing, sequences)) > self._pool.num_available

    def _short(self) -> list[Running]:
        """The sequences that miss pages: few, of those that every step looks at."""
        size = self._pool.page_size
        running = filter(None, self._runs)
        short = [s for s in running if s.num_known + self._num_ahead > len(s.pages) * size]
        return [s for s in short if len(s.pages) < s.need.num_most_pages]

    def _num_growing(self) -> int:
        """Sequences that may want a page more, each of which is kept free."""
        return sum(s.need.num_most_pages > len(s.pages) for s in self.sequences.values())

    def _num_missing(self, sequence: Running) -> int:
        wanted = min(self._num_pages(sequence.num_known), sequence.need.num_most_pages)
        return max(0, wanted - len(sequence.pages))

    def _num_pages(self, num_tokens: int) -> int:
        """Pages for known tokens and two more steps of drafts."""
        return self._pool.num_pages_for(num_tokens + self._num_ahead)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        owners = [*self.sequences.values(), *self._ending]
        rows = self._free_rows + [s.row for s in owners]
        assert sorted(rows) == list(range(len(self._runs))), f"rows lost or doubled: {rows}"
        assert all(s.num_in_flight for s in self._ending), "an ended row is kept"
        owned = [p for s in owners for p in s.pages if self._pool.refcount(p) == 1]
        assert len(owned) == len(set(owned)), "two sequences own one page"
        assert {*self.running} == {*filter(None, self._runs)}, "not those that run"
        assert not self.sequences.keys() & {*self.queue.begun, *self.queue.fresh}, (
            "a granted one waits"
        )
