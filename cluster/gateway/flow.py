"""The life of one attempt: grant, prefill while pulling, decode, stream, release.

One function, one ``finally`` that releases everything (design.md, Life of a request).
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.handles import Handle, Pair
from tandem.core.answer import Piece, TransferStats
from tandem.core.control import Done
from tandem.core.errors import RankLost
from tandem.core.request import Request
from tandem.core.schema import decode, error_of, pack
from tandem.decode_node.service import decode_calls as on_decode
from tandem.kv_transfer.layout import PROTOCOL
from tandem.kv_transfer.messages import Offer
from tandem.prefill_node import prefill_calls as on_prefill

GRACE_S = 1.0
"""A failed prefill is told to its caller and to the decode rank, in no order."""
Reply = TypeVar("Reply")


async def run_request(
    request: Request, pair: Pair, session: int, answer: Answer, tell: Callable[[Piece], None]
) -> None:
    """Serve ``request`` on one pair of ranks and tell its answer piece by piece.

    Whatever ends it (the answer's end, an error, its cancellation), row, pages, lease and inbox
    are released on both.

    Raises ValueError (the request can never be served), Overloaded, Preempted, HandoverError,
    StepFailed or RankLost, the latter also when a rank is found lost that it waits for; after any
    but the first ``answer.rest()`` may be tried again.
    """
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    inbox, load = pair.decode.inboxes.open(pair.identity), pair.prefill.load.computing(num_tokens)
    on_d, on_p = pair.decode.liveness.needed(), pair.prefill.liveness.needed()
    arriving: asyncio.Task[TransferStats] | None = None
    is_decoded = False
    try:
        async with on_d:
            await _grant(request, pair, session)
            async with on_p:
                arriving = asyncio.create_task(_start(request, pair, num_tokens))
                prefilled = await _prefill(request, pair, arriving)
                load.close()
                tell(answer.prefilled(prefilled))
                if not answer.is_finished:
                    answer.pulled(await arriving)
            while not answer.is_finished:
                update = await inbox.get()
                if update.failure is not None:
                    raise error_of(update.failure)
                is_decoded = update.finish_reason is not None
                tell(answer.update(update))
        tell(answer.finished())
    finally:
        load.close()
        if arriving is not None:
            arriving.cancel()
        await pair.close(is_decoded)


async def _grant(request: Request, pair: Pair, session: int) -> None:
    num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
    max_tokens = request.sampling.max_tokens
    size = on_decode.Size(num_prompt, num_output, max_tokens, request.is_begun)
    await _call(pair.decode, "grant", on_decode.Grant(pair.identity, session, size), Done)
    pair.decode.inboxes.granted[pair.identity] = None


async def _start(request: Request, pair: Pair, num_tokens: int) -> TransferStats:
    info, owner = pair.prefill.info, pair.prefill.info.spec
    place = owner.process, owner.seat, owner.epoch
    offer = Offer(PROTOCOL, *place, pair.identity, info.caches, num_tokens)
    asked = on_decode.Start(pair.identity, request, offer, pair.is_suspect)
    return await _call(pair.decode, "start", asked, TransferStats, pair.prefill)


async def _prefill(
    request: Request, pair: Pair, arriving: "asyncio.Task[TransferStats]"
) -> on_prefill.Prefilled:
    """The first token; a hand-over that failed before it ends the wait, unless prefill says soon
    what was wrong."""
    asked = on_prefill.Prefill(pair.identity, request, pair.is_suspect)
    call = asyncio.create_task(_call(pair.prefill, "prefill", asked, on_prefill.Prefilled))
    try:
        await asyncio.wait([call, arriving], return_when=asyncio.FIRST_COMPLETED)
        if arriving.done() and arriving.exception() is not None:
            await asyncio.wait([call], timeout=GRACE_S)
        if not call.done():
            arriving.result()
        return await call
    finally:
        call.cancel()


async def _call(
    rank: Handle, method: str, asked: object, reply: type[Reply], beyond: Handle | None = None
) -> Reply:
    """Call and decode. RankLost names the rank, or the one ``beyond`` it if the rank answered
    that it had lost that one."""
    lost = rank
    try:
        answer = await rank.control.call(method, pack(asked))
        lost = beyond or rank
        return decode(reply, answer)
    except RankLost as error:
        error.rank = lost.life
        raise
