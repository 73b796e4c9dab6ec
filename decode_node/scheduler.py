"""Who may enter a decode rank, who runs in its next step, who makes way. Plain Python."""

from core.errors import Overloaded
from core.request import Request
from core.stopping import num_budget, stop_ids
from decode_node.sequence import Sequence
from kv_transfer.pages import PagePool


class Scheduler:
    """Owner of row slots and sequences; pages come from the pool it is given.

    Pages grow as sequences do, two steps ahead. When the pool is full the youngest running
    sequence is preempted: it goes on later from (prompt_ids, output_ids), nothing is lost.
    A request whose whole answer fits ``max_pages`` can always finish, if need be alone.
    """

    def __init__(
        self,
        pool: PagePool,
        max_rows: int,
        max_drafts: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        max_pages: int | None = None,
    ) -> None:
        self._pool = pool
        self._max_pages = max_pages or pool.num_pages - 1
        self._max_drafts = max_drafts
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._max_rows = max_rows
        self._retired: dict[int, Sequence] = {}
        self.sequences: dict[str, Sequence] = {}

    def admit(self, request: Request) -> Sequence:
        """Reserve a row, pages for what is known, and room for two steps.

        Raises Overloaded when no row is free, or too few pages to let those who run grow by a
        page each; ValueError when the whole answer can never fit, or the request is here.
        """
        if request.request_id in self.sequences:
            raise ValueError(f"request_id: {request.request_id!r} is already running; use another")
        if not self._free_rows:
            raise Overloaded(f"all {self._max_rows} decode rows are taken")
        num_output, sampling = len(request.output_ids), request.sampling
        num_prompt = len(request.prompt_ids)
        budget = num_budget(num_prompt, num_output, sampling.max_tokens, self._max_model_len)
        num_most = self._num_pages(num_prompt + num_output + budget)
        if num_most > self._max_pages:
            raise ValueError(
                f"max_tokens: prompt and answer need {num_most} pages, this node gives a sequence "
                f"{self._max_pages}; ask for fewer tokens or raise kv.num_pages"
            )
        num_pages = min(num_most, self._num_pages(num_prompt + num_output + 1))
        num_growing = sum(s.num_most_pages > len(s.pages) for s in self.sequences.values())
        if num_pages + num_growing > self._pool.num_available:
            raise Overloaded(
                f"{num_pages} pages needed, {self._pool.num_available} free for them and for "
                f"{num_growing} running sequences to grow"
            )
        limit = request.speculation.max_drafts
        sequence = Sequence(
            request=request,
            row=self._free_rows.pop(),
            pages=self._pool.allocate(num_pages),
            stops=stop_ids(sampling, self._eos_ids),
            num_most_pages=num_most,
            max_output=num_output + budget,
            limit=self._max_drafts if limit is None else min(limit, self._max_drafts),
            num_output=num_output,
            accepted_per_position=[0] * self._max_drafts,
            drafted_per_position=[0] * self._max_drafts,
        )
        self.sequences[request.request_id] = sequence
        return sequence

    def drop(self, request_id: str) -> Sequence | None:
        """End a sequence; None if it is already gone. Row and pages are free once no step on its
        way may touch them."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            sequence.ended = True
            self._retired[sequence.row] = sequence
            self._release(sequence)
        return sequence

    def launched(self, sequences: list[Sequence]) -> None:
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
        return sum(map(self._num_missing, self._by_age())) > self._pool.num_available

    def make_room(self) -> list[Sequence]:
        """Give every active sequence pages for its next two steps; who was preempted for it.

        Oldest first; the youngest active ones make way. They are dropped already.
        """
        preempted: list[Sequence] = []
        waiting = self._by_age()
        while waiting:
            sequence = waiting[0]
            missing = self._num_missing(sequence)
            if missing <= self._pool.num_available:
                sequence.pages += self._pool.allocate(missing)
                waiting.pop(0)
                continue
            victim = waiting.pop()
            self.drop(victim.request.request_id)
            preempted.append(victim)
        return preempted

    def _by_age(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if s.active]

    def _num_missing(self, sequence: Sequence) -> int:
        num_tokens = len(sequence.request.prompt_ids) + sequence.num_output
        wanted = min(self._num_pages(num_tokens), sequence.num_most_pages)
        return max(0, wanted - len(sequence.pages))

    def _num_pages(self, num_tokens: int) -> int:
        """Pages for known tokens and two more steps of drafts."""
        return self._pool.num_pages_for(num_tokens + 2 * (self._max_drafts + 1))

    def runnable(self) -> list[Sequence]:
        """Sequences of the next step, by row: active ones that steps on their way, which give at
        least a token each, do not end for certain."""
        running = [
            s
            for s in self.sequences.values()
            if s.active and s.num_output + s.num_in_flight < s.max_output
        ]
        return sorted(running, key=lambda sequence: sequence.row)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        owners = [*self.sequences.values(), *self._retired.values()]
        rows = self._free_rows + [s.row for s in owners]
        assert sorted(rows) == list(range(self._max_rows)), f"rows lost or doubled: {rows}"
        assert all(s.num_in_flight for s in self._retired.values()), "a retired row is kept"
        owned = [page for s in owners for page in s.pages]
        assert len(owned) == len(set(owned)), "two sequences own one page"
