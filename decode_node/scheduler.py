"""Who may enter a decode rank, and how many drafts its next step carries. Plain Python."""

from core.errors import Overloaded
from core.request import Request
from core.stopping import num_budget, stop_ids
from decode_node.sequence import Sequence
from kv_transfer.pages import PagePool


class Scheduler:
    """Owner of row slots and sequences; pages come from the pool it is given.

    Admission reserves pages for the whole answer, so a running sequence never waits for one.
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
        self.sequences: dict[str, Sequence] = {}

    def admit(self, request: Request) -> Sequence:
        """Reserve a row and every page the answer may need.

        Raises Overloaded when no row or too few pages are free, ValueError when the request
        can never fit or is already here.
        """
        if request.request_id in self.sequences:
            raise ValueError(f"request_id: {request.request_id!r} is already running; use another")
        if not self._free_rows:
            raise Overloaded(f"all {self._max_rows} decode rows are taken")
        num_output, sampling = len(request.output_ids), request.sampling
        num_prompt = len(request.prompt_ids)
        budget = num_budget(num_prompt, num_output, sampling.max_tokens, self._max_model_len)
        num_tokens = num_prompt + num_output + budget + self._max_drafts
        num_pages = self._pool.num_pages_for(num_tokens)
        if num_pages > self._pool.num_pages - 1:
            raise ValueError(
                f"max_tokens: prompt and answer need {num_pages} pages of this node's "
                f"{self._pool.num_pages - 1}; ask for fewer tokens or raise kv.num_pages"
            )
        if num_pages > self._pool.num_available:
            raise Overloaded(f"{num_pages} pages needed, {self._pool.num_available} free")
        limit = request.speculation.max_drafts
        sequence = Sequence(
            request=request,
            row=self._free_rows.pop(),
            pages=self._pool.allocate(num_pages),
            stops=stop_ids(sampling, self._eos_ids),
            max_output=num_output + budget,
            limit=self._max_drafts if limit is None else min(limit, self._max_drafts),
            num_output=num_output,
            accepted_per_position=[0] * self._max_drafts,
        )
        self.sequences[request.request_id] = sequence
        return sequence

    def drop(self, request_id: str) -> Sequence | None:
        """Give row and pages back; None if the sequence is already gone."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self._pool.release(sequence.pages)
            self._free_rows.append(sequence.row)
        return sequence

    def active(self) -> list[Sequence]:
        """Sequences of the next step, by row."""
        running = [s for s in self.sequences.values() if s.active]
        return sorted(running, key=lambda sequence: sequence.row)

    def num_drafts(self, active: list[Sequence]) -> int:
        """Drafts of the next step: the most any of its rows may use."""
        return max(sequence.limit for sequence in active)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        rows = self._free_rows + [s.row for s in self.sequences.values()]
        assert sorted(rows) == list(range(self._max_rows)), f"rows lost or doubled: {rows}"
        owned = [page for s in self.sequences.values() for page in s.pages]
        assert len(owned) == len(set(owned)), "two sequences own one page"
