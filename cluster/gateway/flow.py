"""One attempt at an answer: grant, prefill with overlapped KV transfer, decode, release.

``run_request`` covers the whole attempt; its ``finally`` releases all resources.
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
"""Seconds to wait for the prefill call's own error after its hand-over failed.

A failed prefill is reported to the gateway and to the decode rank in either order. The prefill
call's error says more.
"""
Reply = TypeVar("Reply")


async def run_request(
    request: Request,
    pair: AttemptRoute,
    session: int,
    answer: Answer,
    emit: Callable[[Piece], None],
) -> None:
    """Serve ``request`` on one pair of ranks and emit its answer piece by piece.

    The row, pages, lease and inbox of the attempt are released at the end, also after errors and
    cancellation.

    Args:
        request: Request for the rest of the answer.
        pair: Ranks and identity of this attempt.
        session: Nonce under which the decode rank holds resources for this gateway.
        answer: State of the answer across attempts.
        emit: Called with each piece.

    Raises:
        ValueError: The request can never be served.
        RankLost: A call to a rank failed, or the rank was found lost during the attempt.
        Overloaded, Preempted, HandoverError, StepFailed: The attempt failed. After these and after
            RankLost, ``answer.remaining_request()`` may be retried.
    """
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    inbox = pair.decode.inboxes.open(pair.identity)
    load = pair.prefill.load.track_prompt(num_tokens)
    on_d = pair.decode.liveness.cancelled_if_lost()
    on_p = pair.prefill.liveness.cancelled_if_lost()
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
    num_prompt = len(request.prompt_ids)
    num_output = len(request.output_ids)
    max_tokens = request.sampling.max_tokens
    size = on_decode.RequestSize(
        num_prompt=num_prompt,
        num_output=num_output,
        max_tokens=max_tokens,
        is_resumed=request.is_resumed,
    )
    await _call(
        rank=pair.decode,
        method="grant",
        message=on_decode.Grant(pair.identity, session, size),
        reply=Empty,
    )
    pair.decode.inboxes.granted[pair.identity] = None


async def _start_handover(request: Request, pair: AttemptRoute, num_tokens: int) -> TransferStats:
    info = pair.prefill.info
    owner = pair.prefill.info.spec
    address = owner.process_name, owner.rank_name, owner.epoch
    offer = Offer(PROTOCOL, *address, pair.identity, info.caches, num_tokens)
    message = on_decode.StartSequence(
        identity=pair.identity, request=request, offer=offer, is_suspect=pair.is_suspect
    )
    return await _call(
        rank=pair.decode, method="start", message=message, reply=TransferStats, peer=pair.prefill
    )


async def _run_prefill(
    request: Request, pair: AttemptRoute, handover: "asyncio.Task[TransferStats]"
) -> on_prefill.PrefillReply:
    """Call prefill and return the first token.

    A hand-over that fails first ends the wait, unless prefill reports its own error within
    PREFILL_ERROR_WAIT_S.
    """
    message = on_prefill.Prefill(pair.identity, request, pair.is_suspect)
    call = asyncio.create_task(
        _call(rank=pair.prefill, method="prefill", message=message, reply=on_prefill.PrefillReply)
    )
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
    """Call a rank and decode its reply.

    The ``rank`` attribute of a RankLost error names the lost rank. It is ``peer`` if the called
    rank itself replied that it lost ``peer``, otherwise the called rank.
    """
    lost = rank
    try:
        answer = await rank.control.call(method, pack(message))
        lost = peer or rank
        return decode(reply, answer)
    except RankLost as error:
        error.rank = lost.epoch_name
        raise
