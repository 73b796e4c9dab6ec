"""Page allocation and chunked scheduling of prompts on a prefill rank. Plain Python.

Prompts get pages in arrival order, but resumed requests go before new ones. One turn in
NEW_REQUEST_SHARE always goes to a new request (core/turns.py). Prompts with pages are computed in
the same order, in chunks within the token budget of a step. Part of the budget is reserved for the
shortest prompts after the first one. A short prompt therefore never has to wait until long ones are
finished.
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
"""Divisor of a step's token budget that gives the part reserved for prompts after the first."""


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
    """Owns the sequences of a prefill rank: queued for pages, waiting to be computed, or leased.

    A sequence holds its pages from their allocation until ``drop``, so that a decode rank can pull
    their contents. The queue needs no bound, because each queued request holds a grant of a decode
    rank, whose grants are limited.

    Cache entries of a chunk may depend on up to ``min_last_chunk`` tokens after it. So that these
    exist, the last chunk of a prompt has at least ``min_last_chunk`` tokens. A shorter prompt is a
    single chunk.
    """

    def __init__(self, pages: PageSource, max_batch_tokens: int, min_last_chunk: int = 1) -> None:
        self._pages = pages
        self._min_last_chunk = min_last_chunk
        self._pool = pages.pool
        self._max_batch_tokens = max_batch_tokens
        self._queue = TurnQueue[PrefillSequence]()
        self._waiting: deque[PrefillSequence] = deque()
        self.sequences: dict[Identity, PrefillSequence] = {}

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have pages and are not computed completely."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """Number of sequences that wait for pages."""
        return len(self._queue)

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens of all sequences that are not computed yet. Any thread may read it."""
        return sum(sequence.num_left for sequence in list(self.sequences.values()))

    def admit(
        self, identity: Identity, request: Request, is_suspect: bool = False
    ) -> PrefillSequence:
        """Queue a request for the pages of its prompt and of its earlier output, if it resumes.

        Raises:
            ValueError: The tokens need more pages than the rank has.
            HandoverError: The rank already has the sequence, or its decode row is gone.
        """
        if identity in self.sequences:
            raise HandoverError(f"{identity} is already on this prefill rank")
        sequence = PrefillSequence(identity, request, is_suspect)
        self._pages.check_fits(identity, len(sequence.token_ids))
        self.sequences[identity] = sequence
        self._queue.add(identity, sequence, request.is_resumed)
        self._allocate_pages()
        return sequence

    def next_chunks(self) -> list[Chunk]:
        """Return the chunks of the next step, within the token budget. Empty if no prompt waits.

        If other prompts wait, the first prompt leaves ``1 / SHORT_PROMPT_SHARE`` of the budget to
        them. They also get the part that it does not need. The prompts with the fewest tokens left
        come first. No prompt starves, because the first one advances in every step. A suspect
        prompt waits until it is the first, and then runs alone.
        """
        if not self._waiting:
            return []
        first, *others = self._waiting
        behind = [other for other in others if not (first.is_suspect or other.is_suspect)]
        left = self._max_batch_tokens
        allowed = max(1, left - left // SHORT_PROMPT_SHARE) if behind else left
        chunks: list[Chunk] = []
        for sequence in (first, *sorted(behind, key=lambda sequence: sequence.num_left)):
            if allowed <= 0:
                break
            num_tokens = self._chunk_size(sequence.num_left, allowed)
            done = sequence.num_computed
            chunks.append(Chunk(sequence, done, done + num_tokens))
            left -= num_tokens
            allowed = left
        return chunks

    def _chunk_size(self, num_left: int, allowed: int) -> int:
        """Return the size of a sequence's next chunk, normally at most ``allowed`` tokens.

        The chunk leaves no tokens or at least ``min_last_chunk``. It exceeds ``allowed`` only if
        ``min_last_chunk`` or fewer tokens are left.
        """
        if allowed >= num_left or num_left <= self._min_last_chunk:
            return num_left
        return min(allowed, num_left - self._min_last_chunk)

    def advance(self, chunk: Chunk, first_token: int | None) -> None:
        """Record a computed chunk.

        After the last chunk, the sequence stops waiting and its pages enter the prefix cache.
        """
        sequence = chunk.sequence
        sequence.num_computed = chunk.hi
        if first_token is not None:
            self._waiting.remove(sequence)
            self._pages.prefixes.insert((*sequence.token_ids, first_token), sequence.pages)

    def stop_computing(self, sequence: PrefillSequence) -> None:
        """Compute no further chunks of a sequence. The sequence keeps its pages until ``drop``."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def evict_pages(self, sequence: PrefillSequence) -> None:
        """Remove the pages of a sequence from the prefix cache."""
        self._pages.prefixes.evict(sequence.token_ids, sequence.pages)

    def drop(self, identity: Identity) -> None:
        """End a sequence in any phase and release its pages. Unknown sequences are ignored."""
        sequence = self.sequences.pop(identity, None)
        if sequence is None:
            return
        self._queue.discard(identity)
        self.stop_computing(sequence)
        self._pool.release(sequence.pages)
        self._allocate_pages()

    def _allocate_pages(self) -> None:
        """Allocate pages for queued sequences, in turn, while enough are free.

        Later sequences do not overtake one that needs many pages.
        """
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
        assert set(both) <= self.sequences.keys(), "a dropped sequence is still in the queue"
        assert len(set(both)) == len(both), "a sequence is in the queue twice"
        assert not any(sequence.pages for sequence in queued), (
            "a sequence that has pages waits for pages"
        )
