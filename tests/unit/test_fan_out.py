"""If a request is aborted before its tasks have started, every answer still gets its end."""

import asyncio
from collections.abc import Callable

from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.fan_out import AnswerGroup
from tandem.core.answer import Finished, Piece
from tandem.core.config import TINY_MODEL
from tandem.core.info import ModelInfo
from tandem.core.request import ABORT, STOP, Request, SamplingParams
from tandem.text.tokenizer import TextStream, Tokenizer
from tests.waiting import PATIENCE_S, for_ever

TOKENIZER = Tokenizer(TINY_MODEL)
EOS_ID = 1
MODEL = ModelInfo("tiny", "deepseek_v3", 1000, 512, (EOS_ID,), 3, True, "float32")


def answer(index: int, output_ids: tuple[int, ...]) -> Answer:
    request = Request("r", (5, 6), output_ids, sampling=SamplingParams(seed=0, max_tokens=9))
    return Answer(request, TextStream(TOKENIZER), MODEL, index)


async def never(asked: Answer, emit: Callable[[Piece], None]) -> None:
    if not asked.is_finished:
        await for_ever()


async def test_an_abort_at_once_ends_each_answer_once() -> None:
    streams = AnswerGroup([answer(0, (7, EOS_ID)), answer(1, (7,))], never)
    streams.abort()
    async with asyncio.timeout(PATIENCE_S):
        pieces = [piece async for piece in streams.pieces()]
    ends = {piece.index: piece.finish_reason for piece in pieces if isinstance(piece, Finished)}
    assert ends == {0: STOP, 1: ABORT} and len(pieces) == 2


async def test_an_abort_after_a_finished_one_was_told_tells_it_no_more() -> None:
    streams = AnswerGroup([answer(0, (7, EOS_ID)), answer(1, (7,))], never)
    pieces = streams.pieces()
    async with asyncio.timeout(PATIENCE_S):
        first = await anext(pieces)
        await asyncio.sleep(0)
        streams.abort()
        rest = [piece async for piece in pieces]
    assert (first.index, [piece.index for piece in rest]) == (0, [1])
