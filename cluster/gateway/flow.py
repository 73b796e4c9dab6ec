"""The life of one attempt: grant, prefill while pulling, decode, stream, release.

One function, one ``finally`` that releases everything (design.md, Life of a request).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from cluster.gateway.answer import Answer
from cluster.gateway.fleet import Pair
from cluster.gateway.handles import Handle
from core.answer import Piece, TransferStats
from core.control import Done
from core.errors import NodeLost
from core.request import Request
from core.schema import decode, pack
from core.tasks import Tasks
from decode_node import messages as on_decode
from kv_transfer.layout import PROTOCOL
from kv_transfer.messages import Offer
from prefill_node import messages as on_prefill

log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 5.0
_releases = Tasks()
Reply = TypeVar("Reply")


async def run_request(
    request: Request, pair: Pair, session: int, answer: Answer, tell: Callable[[Piece], None]
) -> None:
    """Serve ``request`` on one pair of ranks and tell its answer piece by piece.

    Whatever ends it (the answer's end, an error, its cancellation), row, pages, lease and inbox
    are released on both.

    Raises ValueError (the request can never be served), Overloaded, Preempted, HandoverError or
    NodeLost; after any but the first ``answer.rest()`` may be tried again.
    """
    inbox = pair.decode.open_inbox(pair.identity)
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    pair.prefill.num_tokens += num_tokens
    pair.prefill.num_sent += 1
    arriving: asyncio.Task[TransferStats] | None = None
    decoded = False
    try:
        await _grant(request, pair, session)
        arriving = asyncio.create_task(_start(request, pair, num_tokens))
        prefilled = await _prefill(request, pair, arriving)
        answer.prefilled(prefilled)
        tell(answer.delta((prefilled.first_token,), prefilled.logprobs))
        if not answer.is_finished:
            answer.pulled(await arriving)
        while not answer.is_finished:
            update = await inbox.get()
            if update.error is not None:
                raise NodeLost(update.error)
            decoded = update.finish_reason is not None
            answer.update(update)
            tell(answer.delta(update.token_ids, update.logprobs))
        tell(answer.finished())
    finally:
        pair.prefill.num_tokens -= num_tokens
        pair.decode.close_inbox(pair.identity)
        if arriving is not None:
            arriving.cancel()
        if not decoded:
            await _releases.detached(_release(pair))


async def _grant(request: Request, pair: Pair, session: int) -> None:
    num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
    size = on_decode.Size(num_prompt, num_output, request.sampling.max_tokens)
    asked = on_decode.Grant(pair.identity, session, size)
    await _call(pair.decode, "grant", asked, Done)
    pair.decode.granted.add(pair.identity)


async def _start(request: Request, pair: Pair, num_tokens: int) -> TransferStats:
    owner, identity = pair.prefill.info.spec, pair.identity
    fingerprint = pair.prefill.info.fingerprint
    place = owner.name, owner.seat, owner.epoch
    offer = Offer(PROTOCOL, *place, identity, fingerprint, num_tokens)
    asked = on_decode.Start(identity, request, offer)
    return await _call(pair.decode, "start", asked, TransferStats, pair.prefill)


async def _prefill(
    request: Request, pair: Pair, arriving: "asyncio.Task[TransferStats]"
) -> on_prefill.Prefilled:
    """The first token; a hand-over that failed before it ends the wait."""
    asked = on_prefill.Prefill(pair.identity, request)
    call = asyncio.create_task(_call(pair.prefill, "prefill", asked, on_prefill.Prefilled))
    try:
        await asyncio.wait([call, arriving], return_when=asyncio.FIRST_COMPLETED)
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


async def _release(pair: Pair) -> None:
    """Free both sides; a rank that cannot be told is dead, or its leases run out."""
    calls = (
        pair.decode.control.call("abort", pack(on_decode.Abort(pair.identity))),
        pair.prefill.control.call("cancel", pack(on_prefill.Cancel(pair.identity))),
    )
    for call in calls:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await call
        except Exception as error:
            log.warning("release of %s failed: %s", pair.identity, error)
