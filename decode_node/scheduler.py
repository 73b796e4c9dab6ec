"""Who may enter a decode rank, who runs in its next step, who makes way. Plain Python."""

from core.errors import HandoverError, Overloaded
from core.identity import Identity
from core.request import Request
from core.stopping import num_budget, stop_ids
from decode_node.messages import Size
from decode_node.sequence import Sequence
from kv_transfer.pages import PagePool

MAX_WAITING = 4096
"""Requests that wait for a grant; those that have begun are never refused."""


class Scheduler:
    """Owner of row slots and sequences; pages come from the pool it is given.

    Requests are granted a row and pages first come, first served, those that have begun ahead of
    the others: nobody passes one that needs many pages. Pages grow as sequences do, two steps
    ahead. When the pool is full the youngest running sequence is preempted: it goes on later from
    (prompt_ids, output_ids), nothing is lost. A request whose whole answer fits the pool can
    always finish, if need be alone.
    """

    def __init__(
        self,
        pool: PagePool,
        max_rows: int,
        max_drafts: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._pool = pool
        self._max_drafts = max_drafts
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._max_rows = max_rows
        self._retired: dict[int, Sequence] = {}
        self._begun: dict[Identity, Size] = {}
        self._fresh: dict[Identity, Size] = {}
        self.sequences: dict[Identity, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._begun) + len(self._fresh)

    def ask(self, identity: Identity, size: Size) -> None:
        """Join the queue for a row and pages; ``grant`` tells whose turn has come.

        Raises ValueError when the whole answer can never fit, Overloaded when too many wait.
        """
        num_most, most = self._num_most_pages(size), self._pool.num_pages - 1
        if num_most > most:
            raise ValueError(
                f"max_tokens: prompt and answer need {num_most} pages, this node has {most}; "
                "ask for fewer tokens or raise kv.num_pages"
            )
        if not size.is_begun and len(self._fresh) >= MAX_WAITING:
            raise Overloaded(f"{len(self._fresh)} requests wait for a decode row already")
        assert identity not in self.sequences, f"{identity} was granted already"
        (self._begun if size.is_begun else self._fresh)[identity] = size

    def grant(self) -> list[Identity]:
        """Give rows and pages to those whose turn it is; they hold them from now on."""
        granted = []
        while self._free_rows and (queue := self._begun or self._fresh):
            identity, size = next(iter(queue.items()))
            num_pages = min(
                self._num_most_pages(size), self._num_pages(size.num_prompt + size.num_output + 1)
            )
            if num_pages + self._num_growing() > self._pool.num_available:
                break
            del queue[identity]
            self.sequences[identity] = Sequence(
                identity=identity,
                row=self._free_rows.pop(),
                pages=self._pool.allocate(num_pages),
                num_most_pages=self._num_most_pages(size),
                num_prompt=size.num_prompt,
                num_output=size.num_output,
                max_output=size.num_output + self._budget(size),
            )
            granted.append(identity)
        return granted

    def held(self, identity: Identity) -> Sequence:
        """Raises HandoverError when it holds no row."""
        sequence = self.sequences.get(identity)
        if sequence is None:
            raise HandoverError(f"{identity} holds no row: it was aborted, or never granted one")
        return sequence

    def begin(self, identity: Identity, request: Request, is_suspect: bool = False) -> Sequence:
        """The request that was granted. Raises HandoverError when its grant is gone."""
        sequence = self.held(identity)
        stops = stop_ids(request.sampling, self._eos_ids)
        sequence.begin(request, stops, self._max_drafts, is_suspect)
        return sequence

    def drop(self, identity: Identity) -> Sequence | None:
        """End a sequence, or its wait for a row; None if it is already gone. Row and pages are
        free once no step on its way may touch them."""
        self._begun.pop(identity, None)
        self._fresh.pop(identity, None)
        sequence = self.sequences.pop(identity, None)
        if sequence is not None:
            sequence.ended = True
            self._retired[sequence.row] = sequence
            self._release(sequence)
        return sequence

    def launched(self, sequences: tuple[Sequence, ...]) -> None:
        """A step of ``sequences`` is on its way."""
        for sequence in sequences:
            sequence.num_in_flight += 1

    def landed(self, sequences: tuple[Sequence, ...]) -> None:
        """A step of ``sequences`` is through."""
        for sequence in sequences:
            sequence.num_in_flight -= 1
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.ended and not sequence.num_in_flight:
            del self._retired[sequence.row]
            self._pool.release(sequence.pages)
            self._free_rows.append(sequence.row)

    def must_preempt(self) -> bool:
        """Whether ``make_room`` would have to take pages from a sequence."""
        return self._lacks(self._short())

    def make_room(self) -> list[Sequence]:
        """Give every active sequence pages for its next two steps; who was preempted for it.

        Oldest first; the youngest active ones make way. They are dropped already.
        """
        preempted: list[Sequence] = []
        waiting = self._short()
        if self._lacks(waiting):
            waiting = self._by_age()
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
        """Whether some active sequence has to be alone in its step."""
        return any(s.num_alone for s in self._by_age())

    def runnable(self, suspects_turn: bool = False) -> list[Sequence]:
        """Sequences of the next step, by row: active ones that steps on their way, which give at
        least a token each, do not end for certain. The oldest suspect alone, or all others,
        whichever there are; if both, the suspect on its turn."""
        running = [
            s
            for s in self.sequences.values()
            if s.active and s.num_output + s.num_in_flight < s.max_output
        ]
        suspects = [s for s in running if s.num_alone]
        others = [s for s in running if not s.num_alone]
        if suspects and (suspects_turn or not others):
            return suspects[:1]
        return sorted(others, key=lambda sequence: sequence.row)

    def _by_age(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if s.active]

    def _lacks(self, sequences: list[Sequence]) -> bool:
        return sum(map(self._num_missing, sequences)) > self._pool.num_available

    def _short(self) -> list[Sequence]:
        """The active sequences that miss pages: few, of those that every step looks at."""
        ahead, page_size = 2 * (self._max_drafts + 1), self._pool.page_size
        return [
            s
            for s in self.sequences.values()
            if s.num_prompt + s.num_output + ahead > len(s.pages) * page_size
            and s.active
            and len(s.pages) < s.num_most_pages
        ]

    def _num_growing(self) -> int:
        """Running sequences that may want a page more, each of which is kept free."""
        return sum(s.num_most_pages > len(s.pages) for s in self.sequences.values())

    def _num_missing(self, sequence: Sequence) -> int:
        num_tokens = sequence.num_prompt + sequence.num_output
        wanted = min(self._num_pages(num_tokens), sequence.num_most_pages)
        return max(0, wanted - len(sequence.pages))

    def _budget(self, size: Size) -> int:
        return num_budget(size.num_prompt, size.num_output, size.max_tokens, self._max_model_len)

    def _num_most_pages(self, size: Size) -> int:
        return self._num_pages(size.num_prompt + size.num_output + self._budget(size))

    def _num_pages(self, num_tokens: int) -> int:
        """Pages for known tokens and two more steps of drafts."""
        return self._pool.num_pages_for(num_tokens + 2 * (self._max_drafts + 1))

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        owners = [*self.sequences.values(), *self._retired.values()]
        rows = self._free_rows + [s.row for s in owners]
        assert sorted(rows) == list(range(self._max_rows)), f"rows lost or doubled: {rows}"
        assert all(s.num_in_flight for s in self._retired.values()), "a retired row is kept"
        owned = [p for s in owners for p in s.pages if self._pool.refcount(p) == 1]
        assert len(owned) == len(set(owned)), "two sequences own one page"
        assert not self.sequences.keys() & {*self._begun, *self._fresh}, "a granted one waits"
