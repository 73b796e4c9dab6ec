"""Which prompt tokens the next prefill step computes: first come, first served, in chunks of
at most the token budget. Plain Python."""

from collections import deque
from dataclasses import dataclass

from core.errors import Overloaded
from core.request import Request
from kv_transfer.pages import PagePool
from prefill_node.sequence import Sequence

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [lo, hi) of one sequence."""

    sequence: Sequence
    lo: int
    hi: int

    @property
    def is_last(self) -> bool:
        return self.hi == len(self.sequence.token_ids)


class Scheduler:
    """Owner of the prefill rank's sequences, waiting and leased alike.

    A sequence holds its pages from admission until ``drop``: after its prefill is done they
    are what decode ranks pull from.
    """

    def __init__(self, pool: PagePool, max_batch_tokens: int) -> None:
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Key] = deque()
        self.sequences: dict[Key, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def admit(self, request: Request, attempt: int) -> Sequence:
        """Reserve pages for prompt and resumed output and join the queue.

        Raises Overloaded when too few pages are free, ValueError when it can never fit or the
        same attempt is already here.
        """
        key = (request.request_id, attempt)
        if key in self.sequences:
            raise ValueError(f"request_id: {key} is already here; use another request_id")
        num_pages = self._pool.num_pages_for(len(request.prompt_ids) + len(request.output_ids))
        if num_pages > self._pool.num_pages - 1:
            raise ValueError(
                f"prompt: needs {num_pages} pages of this node's {self._pool.num_pages - 1}; "
                "shorten it or raise kv.num_pages"
            )
        if num_pages > self._pool.num_free:
            raise Overloaded(f"{num_pages} prefill pages needed, {self._pool.num_free} free")
        sequence = Sequence(request, attempt, self._pool.allocate(num_pages))
        self.sequences[key] = sequence
        self._waiting.append(key)
        return sequence

    def next_chunk(self) -> Chunk | None:
        """The next tokens to compute, None when nothing waits."""
        if not self._waiting:
            return None
        sequence = self.sequences[self._waiting[0]]
        hi = sequence.num_done + min(self._max_batch_tokens, sequence.num_left)
        return Chunk(sequence, sequence.num_done, hi)

    def advance(self, chunk: Chunk) -> None:
        """The chunk is computed; its sequence leaves the queue with its last one."""
        chunk.sequence.num_done = chunk.hi
        if chunk.is_last:
            self._waiting.popleft()

    def drop(self, key: Key) -> None:
        """Free a sequence's pages, computed or still waiting; unknown keys are left alone."""
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self._pool.release(sequence.pages)
            if key in self._waiting:
                self._waiting.remove(key)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        assert set(self._waiting) <= self.sequences.keys(), "a dropped sequence still waits"
