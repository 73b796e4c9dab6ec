"""Page allocation and chunked scheduling of prompts on a prefill rank. Plain Python.

Prompts get pages in arrival order. Resumed requests go before new ones, which get one turn in
NEW_REQUEST_SHARE (core/turns.py). Prompts with pages are computed in the same order, in chunks
within the token budget. Part of the budget goes to the shortest prompts after the first. A short
prompt therefore never waits for one or more long ones to finish.
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
"""Divisor of a step's token budget: 1/n of it is reserved for prompts after the first."""


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

    A sequence holds its pages from their allocation until ``drop``. After the prefill, decode ranks
    pull from them. The queue needs no bound, because decode ranks limit the number of grants.

    Cache entries depend on later tokens. The last chunk of a prompt therefore has at least
    ``min_last_chunk`` tokens, or the whole prompt if that is shorter.
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
        """Number of sequences that have pages and are not completely computed."""
        return len(self._waiting)

    @property
    def num_queued(self) -> int:
        """Number of sequences that wait for pages."""
        return len(self._queue)

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens left to compute, of all sequences. Any thread may read it."""
        return sum(sequence.num_left for sequence in list(self.sequences.values()))

    def admit(
        self, identity: Identity, request: Request, is_suspect: bool = False
    ) -> PrefillSequence:
        """Queue a request's prompt and resumed output for pages.

        Raises:
            ValueError: The tokens can never fit.
            HandoverError: The sequence is already here, or its decode row is gone.
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
        """Return the chunks of the next step, within the token budget. Empty if no prompt waits.

        The first prompt leaves ``1 / SHORT_PROMPT_SHARE`` of the budget to later prompts, if any.
        They get all that it does not need, prompts with the fewest tokens left first. No prompt
        starves, because the first one advances in every step. A suspect prompt runs alone once it
        is the first.
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
        """Return the chunk size: at most ``allowed``, leaving enough tokens for the last chunk.

        Exceeds ``allowed`` only if ``min_last_chunk`` or fewer tokens are left.
        """
        if allowed >= num_left or num_left <= self._min_last_chunk:
            return num_left
        return min(allowed, num_left - self._min_last_chunk)

    def advance(self, chunk: Chunk, first_token: int | None) -> None:
        """Record a computed chunk.

        After the last one, the sequence stops waiting and its pages enter the prefix cache.
        """
        sequence = chunk.sequence
        sequence.num_computed = chunk.hi
        if first_token is not None:
            self._waiting.remove(sequence)
            self._pages.prefixes.insert((*sequence.token_ids, first_token), sequence.pages)

    def stop_computing(self, sequence: PrefillSequence) -> None:
        """Compute no more of a sequence. It holds its pages until ``drop``."""
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
        """Allocate pages for queued sequences, in turn. One that needs many is not overtaken."""
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
