"""Which prompts get pages, and which of their tokens the next step computes. Plain Python.

Prompts wait for pages first come, first served. Prompts of begun answers go first, but fresh ones
get one turn in NEW_REQUEST_SHARE (core/turns.py). Placed prompts are computed in the same order, in
chunks of at most the token budget; a part of the budget goes to the shortest of those behind, so
that a short prompt never waits for the whole of a long one, nor for all of several.
"""

from collections import deque
from dataclasses import dataclass

from tandem.core.errors import HandoverError
from tandem.core.identity import Identity
from tandem.core.request import Request
from tandem.core.turns import TurnQueue
from tandem.prefill_node.page_source import PageSource
from tandem.prefill_node.sequence import PrefillSequence

SHORT_PROMPT_SHARE = 4
"""One part in this many of a step's tokens is for prompts behind the first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [lo, hi) of one sequence."""

    sequence: PrefillSequence
    lo: int
    hi: int

    @property
    def num_tokens(self) -> int:
        return self.hi - self.lo

    @property
    def is_last(self) -> bool:
        return self.hi == len(self.sequence.token_ids)


class Scheduler:
    """Owner of the prefill rank's sequences: queued for pages, waiting to be computed, leased.

    A sequence holds its pages from when it is placed until ``drop``: after its prefill is done
    they are what decode ranks pull from. The queue is bounded by what decode ranks grant. Cache
    entries of the last tokens depend on those behind, so many of them are computed at once: the
    ``min_last_chunk`` of a prompt's last chunk.
    """

    def __init__(self, pages: PageSource, max_batch_tokens: int, min_last_chunk: int = 1) -> None:
        self._pages, self._min_last_chunk = pages, min_last_chunk
        self._pool = pages.pool
        self._max_batch_tokens = max_batch_tokens
        self._queue = TurnQueue[PrefillSequence]()
        self._waiting: deque[PrefillSequence] = deque()
        self.sequences: dict[Identity, PrefillSequence] = {}

    @property
    def num_waiting(self) -> int:
        """Placed and not wholly computed."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """Without pages yet."""
        return len(self._queue)

    @property
    def num_tokens_left(self) -> int:
        """To be computed of all sequences; any thread."""
        return sum(sequence.num_left for sequence in list(self.sequences.values()))

    def admit(
        self, identity: Identity, request: Request, is_suspect: bool = False
    ) -> PrefillSequence:
        """Take in prompt and resumed output; it gets pages, known ones first, in its turn.

        Raises ValueError when it can never fit, HandoverError when it is here already.
        """
        if identity in self.sequences:
            raise HandoverError(f"{identity} is here already")
        sequence = PrefillSequence(identity, request, is_suspect)
        self._pages.check_fits(identity, len(sequence.token_ids))
        self.sequences[identity] = sequence
        self._queue.add(identity, sequence, request.is_resumed)
        self._allocate_pages()
        return sequence

    def next_chunks(self) -> list[Chunk]:
        """The next tokens to compute, at most the budget in all; empty when nothing waits.

        The first prompt leaves ``1 / SHORT_PROMPT_SHARE`` of the budget to those behind it if they
        want it, and they get what it does not need, those with the fewest tokens left first. Nobody
        waits for ever: whoever came first moves on in every step. A suspect gets one to itself when
        it has become the first.
        """
        if not self._waiting:
            return []
        first, *others = self._waiting
        behind = [one for one in others if not (first.is_suspect or one.is_suspect)]
        left = self._max_batch_tokens
        allowed = max(1, left - left // SHORT_PROMPT_SHARE) if behind else left
        chunks: list[Chunk] = []
        for sequence in (first, *sorted(behind, key=lambda one: one.num_left)):
            if allowed <= 0:
                break
            num_tokens = self._chunk_size(sequence.num_left, allowed)
            done = sequence.num_computed
            chunks.append(Chunk(sequence, done, done + num_tokens))
            left -= num_tokens
            allowed = left
        return chunks

    def _chunk_size(self, num_left: int, allowed: int) -> int:
        """Of the tokens left: a prompt's last chunk has ``min_last_chunk`` of them, or all there
        are."""
        if allowed >= num_left or num_left <= self._min_last_chunk:
            return num_left
        return min(allowed, num_left - self._min_last_chunk)

    def advance(self, chunk: Chunk, first_token: int | None) -> None:
        """The chunk is computed; with its last one a sequence leaves the queue and its pages
        become known to the prefix cache."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.hi
        if first_token is not None:
            self._waiting.remove(sequence)
            self._pages.prefixes.insert((*sequence.token_ids, first_token), sequence.pages)

    def stop_computing(self, sequence: PrefillSequence) -> None:
        """Compute no more of it; it holds its pages until it is dropped."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def evict_pages(self, sequence: PrefillSequence) -> None:
        """Take what the prefix cache knows of the sequence's pages out of it."""
        self._pages.prefixes.evict(sequence.token_ids, sequence.pages)

    def drop(self, identity: Identity) -> None:
        """End a sequence in any phase and give up its pages; unknown ones are left alone."""
        sequence = self.sequences.pop(identity, None)
        if sequence is None:
            return
        self._queue.discard(identity)
        self.stop_computing(sequence)
        self._pool.release(sequence.pages)
        self._allocate_pages()

    def _allocate_pages(self) -> None:
        """Give pages to those that queue, in order: nobody passes one that needs many."""
        while first := self._queue.peek():
            _, sequence = first
            allocated = self._pages.allocate(sequence.identity, sequence.token_ids)
            if allocated is None:
                return
            sequence.pages, num_known = allocated
            sequence.num_cached = sequence.num_computed = num_known * self._pool.page_size
            self._queue.pop()
            self._waiting.append(sequence)

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        queued = [*self._queue.resumed.values(), *self._queue.new.values()]
        both = [sequence.identity for sequence in [*queued, *self._waiting]]
        assert set(both) <= self.sequences.keys(), "a dropped sequence still waits"
        assert len(set(both)) == len(both), "a sequence waits twice"
        assert not any(sequence.pages for sequence in queued), "one with pages waits for them"
