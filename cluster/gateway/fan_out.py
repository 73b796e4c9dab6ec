"""The answers to one request: as many requests of their own, their streams merged."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.piece_writer import MAX_UNREAD_ANSWER_BYTES
from tandem.core.answer import Finished, Piece
from tandem.core.request import Request

_SEED_STEP = 0x9E3779B97F4A7C15
_MAX_SEED = (1 << 63) - 1
ServeAnswer = Callable[[Answer, Callable[[Piece], None]], Coroutine[Any, Any, None]]


def split_request(request: Request) -> list[Request]:
    """One request per answer; answer i has the seed ``seed + i * _SEED_STEP`` mod 2^63, so the
    first is the answer of n = 1. Where no seed is given one is drawn."""
    sampling = request.sampling
    first = secrets.randbits(63) if sampling.seed is None else sampling.seed
    seeds = [(first + i * _SEED_STEP) & _MAX_SEED for i in range(sampling.n)]
    return [replace(request, sampling=replace(sampling, n=1, seed=seed)) for seed in seeds]


class AnswerGroup:
    """The answers to one request as one stream, each written by a task of its own.

    ``serve(answer, emit)`` tells the pieces of one answer; one that is finished from the start
    has none left to tell. So an abort ends what writes an answer, whatever that waits for, and
    never the reader. Its length is how many answers go on.
    """

    def __init__(self, answers: Sequence[Answer], serve: ServeAnswer) -> None:
        self._queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        self.num_unread_bytes = 0
        self.on_backlog_full: Callable[[], None] = lambda: None
        """Called when more than MAX_UNREAD_ANSWER_BYTES wait to be read."""
        emit = self._emit
        # Told here and not by their tasks, which an abort may end before they have begun.
        self._answers = answers
        for finished in (answer.make_finished() for answer in answers if answer.is_finished):
            emit(finished)
        self._tasks = [asyncio.create_task(serve(answer, emit)) for answer in answers]
        for task, answer in zip(self._tasks, answers, strict=True):
            task.add_done_callback(partial(self._on_task_done, answer))

    def __len__(self) -> int:
        return sum(not task.done() for task in self._tasks)

    @property
    def num_with_tokens(self) -> int:
        """Number of the answers that go on and have a token."""
        pairs = zip(self._tasks, self._answers, strict=True)
        return sum(bool(answer.token_ids) for task, answer in pairs if not task.done())

    def abort(self) -> None:
        """Every answer that goes on ends with a Finished of reason abort."""
        for task in self._tasks:
            task.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Of all answers as they come; one Finished per answer.

        The first error ends them all. Closing it early ends them all too.
        """
        num_left = len(self._tasks)
        try:
            while num_left:
                piece = await self._queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                self.num_unread_bytes -= piece.num_bytes
                num_left -= isinstance(piece, Finished)
                yield piece
        finally:
            if num_left:
                self.abort()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # An error that waits for the client to hear of it holds these frames.
            self._queue = asyncio.Queue()
            self.num_unread_bytes = 0

    def _emit(self, piece: Piece) -> None:
        self._queue.put_nowait(piece)
        self.num_unread_bytes += piece.num_bytes
        if self.num_unread_bytes > MAX_UNREAD_ANSWER_BYTES:
            self.on_backlog_full()

    def _on_task_done(self, answer: Answer, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)
        elif task.cancelled() and not answer.is_finished:
            self._emit(answer.finish_aborted())
