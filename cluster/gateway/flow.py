"""The life of one attempt: grant, prefill while pulling, decode, stream, release.

One function, one ``finally`` that releases everything (design.md, Life of a request).
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.handles import AttemptRoute, RankHandle
from tandem.core.answer import Piece, TransferStats
from tandem.core.control import Empty
from tandem.core.errors import RankLost
from tandem.core.request import Request
from tandem.core.schema import decode, pack, to_error
from tandem.decode_node.service import decode_calls as on_decode
from tandem.kv_transfer.layout import PROTOCOL
from tandem.kv_transfer.messages import Offer
from tandem.prefill_node import prefill_calls as on_prefill

PREFILL_ERROR_WAIT_S = 1.0
"""A failed prefill is told to its caller and to the decode rank, in no order."""
Reply = TypeVar("Reply")


async def run_request(
    request: Request,
    pair: AttemptRoute,
    session: int,
    answer: Answer,
    emit: Callable[[Piece], None],
) -> None:
    """Serve ``request`` on one pair of ranks and tell its answer piece by piece.

    Whatever ends it (the answer's end, an error, its cancellation), row, pages, lease and inbox
    are released on both.

    Raises ValueError (the request can never be served), Overloaded, Preempted, HandoverError,
    StepFailed or RankLost, the latter also when a rank is found lost that it waits for; after any
    but the first ``answer.rest()`` may be tried again.
    """
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    inbox, load = (
        pair.decode.inboxes.open(pair.identity),
        pair.prefill.load.track_prompt(num_tokens),
    )
    on_d, on_p = pair.decode.liveness.cancelled_if_lost(), pair.prefill.liveness.cancelled_if_lost()
    handover: asyncio.Task[TransferStats] | None = None
    is_decoded = False
    try:
        async with on_d:
            await _request_grant(request, pair, session)
            async with on_p:
                handover = asyncio.create_task(_start_handover(request, pair, num_tokens))
                prefilled = await _run_prefill(request, pair, handover)
                load.close()
                emit(answer.on_prefilled(prefilled))
                if not answer.is_finished:
                    answer.on_pulled(await handover)
            while not answer.is_finished:
                update = await inbox.get()
                if update.failure is not None:
                    raise to_error(update.failure)
                is_decoded = update.finish_reason is not None
                emit(answer.update(update))
        emit(answer.make_finished())
    finally:
        load.close()
        if handover is not None:
            handover.cancel()
        await pair.close(is_decoded)


async def _request_grant(request: Request, pair: AttemptRoute, session: int) -> None:
    num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
    max_tokens = request.sampling.max_tokens
    size = on_decode.RequestSize(num_prompt, num_output, max_tokens, request.is_resumed)
    await _call(pair.decode, "grant", on_decode.Grant(pair.identity, session, size), Empty)
    pair.decode.inboxes.granted[pair.identity] = None


async def _start_handover(request: Request, pair: AttemptRoute, num_tokens: int) -> TransferStats:
    info, owner = pair.prefill.info, pair.prefill.info.spec
    place = owner.process_name, owner.rank_name, owner.epoch
    offer = Offer(PROTOCOL, *place, pair.identity, info.caches, num_tokens)
    message = on_decode.Start(pair.identity, request, offer, pair.is_suspect)
    return await _call(pair.decode, "start", message, TransferStats, pair.prefill)


async def _run_prefill(
    request: Request, pair: AttemptRoute, handover: "asyncio.Task[TransferStats]"
) -> on_prefill.PrefillReply:
    """The first token; a hand-over that failed before it ends the wait, unless prefill says soon
    what was wrong."""
    message = on_prefill.Prefill(pair.identity, request, pair.is_suspect)
    call = asyncio.create_task(_call(pair.prefill, "prefill", message, on_prefill.PrefillReply))
    try:
        await asyncio.wait([call, handover], return_when=asyncio.FIRST_COMPLETED)
        if handover.done() and handover.exception() is not None:
            await asyncio.wait([call], timeout=PREFILL_ERROR_WAIT_S)
        if not call.done():
            handover.result()
        return await call
    finally:
        call.cancel()


async def _call(
    rank: RankHandle,
    method: str,
    message: object,
    reply: type[Reply],
    peer: RankHandle | None = None,
) -> Reply:
    """Call and decode. RankLost names the rank, or the one ``beyond`` it if the rank answered
    that it had lost that one."""
    lost = rank
    try:
        answer = await rank.control.call(method, pack(message))
        lost = peer or rank
        return decode(reply, answer)
    except RankLost as error:
        error.rank = lost.epoch_name
        raise
