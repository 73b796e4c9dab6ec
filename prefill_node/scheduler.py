"""Which prompt tokens the next prefill step computes. Plain Python.

First come, first served, in chunks of at most the token budget; a part of the budget goes to the
shortest of those behind, so that a short prompt never waits for the whole of a long one, nor for
all of several.
"""

from collections import deque
from dataclasses import dataclass

from core.errors import Overloaded
from core.request import Request
from kv_transfer.pages import PagePool
from prefill_node.prefix_cache import PrefixCache
from prefill_node.sequence import Sequence

Key = tuple[str, int]

SHORT_SHARE = 4
"""One part in this many of a step's tokens is for prompts behind the first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [lo, hi) of one sequence."""

    sequence: Sequence
    lo: int
    hi: int

    @property
    def num_tokens(self) -> int:
        return self.hi - self.lo

    @property
    def is_last(self) -> bool:
        return self.hi == len(self.sequence.token_ids)


class Scheduler:
    """Owner of the prefill rank's sequences, waiting and leased alike, and its prefix cache.

    A sequence holds its pages from admission until ``drop``: after its prefill is done they
    are what decode ranks pull from.
    """

    def __init__(self, pool: PagePool, max_batch_tokens: int) -> None:
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Key] = deque()
        self.sequences: dict[Key, Sequence] = {}
        self.prefixes = PrefixCache(pool)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def admit(self, request: Request, attempt: int) -> Sequence:
        """Reserve pages for prompt and resumed output, known ones first, and join the queue.

        Raises Overloaded when too few pages are free, ValueError when it can never fit or the
        same attempt is already here.
        """
        key = (request.request_id, attempt)
        if key in self.sequences:
            raise ValueError(f"request_id: {key} is already here; use another request_id")
        token_ids = request.prompt_ids + request.output_ids
        num_pages = self._pool.num_pages_for(len(token_ids))
        if num_pages > self._pool.num_pages - 1:
            raise ValueError(
                f"prompt: needs {num_pages} pages of this node's {self._pool.num_pages - 1}; "
                "shorten it or raise kv.num_pages"
            )
        known = self.prefixes.take(token_ids)
        if num_pages - len(known) > self._pool.num_available:
            self._pool.release(known)
            raise Overloaded(f"{num_pages} prefill pages needed, {self._pool.num_available} free")
        pages = known + self._pool.allocate(num_pages - len(known))
        num_cached = len(known) * self._pool.page_size
        sequence = Sequence(request, attempt, pages, num_cached, num_done=num_cached)
        self.sequences[key] = sequence
        self._waiting.append(key)
        return sequence

    def next_chunks(self) -> list[Chunk]:
        """The next tokens to compute, at most the budget in all; empty when nothing waits.

        The first prompt leaves ``1 / SHORT_SHARE`` of the budget to those behind it if they want
        it, and they get what it does not need, those with the fewest tokens left first. Nobody
        waits for ever: whoever came first moves on in every step.
        """
        chunks: list[Chunk] = []
        left = self._max_batch_tokens
        waiting = [self.sequences[key] for key in self._waiting]
        for place, sequence in enumerate(
            waiting[:1] + sorted(waiting[1:], key=lambda one: one.num_left)
        ):
            allowed = left
            if place == 0 and len(waiting) > 1:
                allowed = max(1, left - left // SHORT_SHARE)
            num_tokens = min(allowed, sequence.num_left)
            if num_tokens == 0:
                break
            done = sequence.num_done
            chunks.append(Chunk(sequence, done, done + num_tokens))
            left -= num_tokens
        return chunks

    def advance(self, chunk: Chunk, first_token: int | None) -> None:
        """The chunk is computed; with its last one a sequence leaves the queue and its pages
        become known to the prefix cache."""
        sequence = chunk.sequence
        sequence.num_done = chunk.hi
        if first_token is not None:
            self._waiting.remove((sequence.request.request_id, sequence.attempt))
            self.prefixes.publish((*sequence.token_ids, first_token), sequence.pages)

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
        assert len(set(self._waiting)) == len(self._waiting), "a sequence waits twice"
