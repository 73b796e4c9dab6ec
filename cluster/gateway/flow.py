"""The life of one attempt: grant, prefill while pulling, decode, stream, release.

One function, one ``finally`` that releases everything (design.md, Life of a request).
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from cluster.gateway.answer import Answer
from cluster.gateway.fleet import Pair
from cluster.gateway.handles import Handle
from core.answer import Piece, TransferStats
from core.control import Done
from core.errors import NodeLost
from core.request import Request
from core.schema import decode, error_of, pack
from decode_node import messages as on_decode
from kv_transfer.layout import PROTOCOL
from kv_transfer.messages import Offer
from prefill_node import messages as on_prefill

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
    StepFailed or NodeLost, the latter also when a rank is found lost that it waits for; after any
    but the first ``answer.rest()`` may be tried again.
    """
    inbox = pair.decode.open_inbox(pair.identity)
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    decoded, load = False, ExitStack()
    load.enter_context(pair.prefill.computing(num_tokens))
    try:
        async with pair.decode.needed():
            await _grant(request, pair, session)
            async with pair.prefill.needed():
                await _hand_over(request, pair, num_tokens, answer, tell, load)
            while not answer.is_finished:
                update = await inbox.get()
                if update.failure is not None:
                    raise error_of(update.failure)
                decoded = update.finish_reason is not None
                answer.update(update)
                tell(answer.delta(update.token_ids, update.logprobs))
        tell(answer.finished())
    finally:
        load.close()
        pair.decode.close_inbox(pair.identity)
        if not decoded:
            await _released(pair)


async def _hand_over(
    request: Request,
    pair: Pair,
    num_tokens: int,
    answer: Answer,
    tell: Callable[[Piece], None],
    load: ExitStack,
) -> None:
    """From the grant to a sequence that steps, or to an answer that its first token ends; then
    the prompt is a ``load`` no more."""
    arriving = asyncio.create_task(_start(request, pair, num_tokens))
    try:
        prefilled = await _prefill(request, pair, arriving)
        load.close()
        answer.prefilled(prefilled)
        tell(answer.delta((prefilled.first_token,), prefilled.logprobs))
        if not answer.is_finished:
            answer.pulled(await arriving)
    finally:
        arriving.cancel()


async def _grant(request: Request, pair: Pair, session: int) -> None:
    num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
    size = on_decode.Size(num_prompt, num_output, request.sampling.max_tokens)
    asked = on_decode.Grant(pair.identity, session, size)
    await _call(pair.decode, "grant", asked, Done)
    pair.decode.granted.add(pair.identity)


async def _start(request: Request, pair: Pair, num_tokens: int) -> TransferStats:
    owner, identity = pair.prefill.info.spec, pair.identity
    fingerprint = pair.prefill.info.fingerprint
    place = owner.process, owner.seat, owner.epoch
    offer = Offer(PROTOCOL, *place, identity, fingerprint, num_tokens)
    asked = on_decode.Start(identity, request, offer, pair.is_suspect)
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
    """Call and decode. NodeLost names the rank, or the one ``beyond`` it if the rank answered
    that it had lost that one."""
    lost = rank
    try:
        answer = await rank.control.call(method, pack(asked))
        lost = beyond or rank
        return decode(reply, answer)
    except NodeLost as error:
        error.node = lost.name
        raise


async def _released(pair: Pair) -> None:
    """Both sides are free; one that is lost is told too, but nobody waits for that."""
    abort, cancel = on_decode.Abort(pair.identity), on_prefill.Cancel(pair.identity)
    releases = (pair.decode, "abort", abort), (pair.prefill, "cancel", cancel)
    told = [(rank, rank.release(method, asked)) for rank, method, asked in releases]
    waited_for = (asyncio.shield(release) for rank, release in told if rank.is_heard.is_set())
    await asyncio.gather(*waited_for, return_exceptions=True)
