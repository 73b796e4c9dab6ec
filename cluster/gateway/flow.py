"""The life of one request: reserve, prefill while pulling, decode, stream, release.

One function, one ``finally`` that releases everything (design.md, Life of a request).
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.gateway.answer import Answer
from cluster.gateway.nodes import DecodeHandle, PrefillHandle
from cluster.gateway.retries import patiently
from core.errors import NodeLost
from core.request import Delta, Finished, Request
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


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a request runs. ``attempt`` names this try and is never used again, so that late
    messages of an earlier try, or of a request of the same id, cannot touch this one."""

    prefill: PrefillHandle
    decode: DecodeHandle
    attempt: int = field(default_factory=lambda: secrets.randbits(48))


async def run_request(
    request: Request, pair: Pair, answer: Answer
) -> AsyncGenerator[Delta | Finished, None]:
    """Serve ``request`` on one pair of nodes and yield its answer.

    Whatever ends it (the answer's end, an error, the caller closing the generator), row, pages,
    lease and inbox are released on both nodes.

    Raises ValueError (the request can never be served), Overloaded, Preempted, HandoverError or
    NodeLost; after any but the first ``answer.rest()`` may be tried again.
    """
    inbox = pair.decode.open_inbox(request.request_id)
    num_tokens = len(request.prompt_ids) + len(request.output_ids)
    pair.prefill.num_tokens += num_tokens
    pair.prefill.num_sent += 1
    decoded = False
    try:
        await _reserve(request, pair, num_tokens)
        prefilled = await _prefill(request, pair)
        answer.prefilled(prefilled)
        yield answer.delta((prefilled.first_token,), prefilled.logprobs)
        if not answer.is_finished:
            answer.pulled(await _arrival(request, pair))
        while not answer.is_finished:
            update = await inbox.get()
            if update.error is not None:
                raise NodeLost(update.error)
            decoded = update.finish_reason is not None
            answer.update(update)
            yield answer.delta(update.token_ids, update.logprobs)
        yield answer.finished()
    finally:
        pair.prefill.num_tokens -= num_tokens
        pair.decode.close_inbox(request.request_id)
        if not decoded:
            await _releases.detached(_release(request, pair))


async def _reserve(request: Request, pair: Pair, num_tokens: int) -> None:
    info = pair.prefill.info
    offer = Offer(
        PROTOCOL,
        info.name,
        str(info.epoch),
        request.request_id,
        pair.attempt,
        info.fingerprint,
        num_tokens,
    )
    asked = pack(on_decode.Reserve(request, offer))
    # In turn: or requests that need few pages would pass one that needs many for ever.
    async with pair.decode.turn:
        await patiently(request, lambda: _call(pair.decode, "reserve", asked, on_decode.Done))


async def _prefill(request: Request, pair: Pair) -> on_prefill.Prefilled:
    asked = pack(on_prefill.Prefill(request, pair.attempt))
    return await patiently(
        request, lambda: _call(pair.prefill, "prefill", asked, on_prefill.Prefilled)
    )


async def _arrival(request: Request, pair: Pair) -> on_decode.Pulled:
    asked = pack(on_decode.Await(request.request_id))
    return await _call(pair.decode, "arrival", asked, on_decode.Pulled, pair.prefill)


async def _call(
    node: PrefillHandle | DecodeHandle,
    method: str,
    asked: bytes,
    reply: type[Reply],
    beyond: PrefillHandle | None = None,
) -> Reply:
    """Call and decode. NodeLost names the node, or the one ``beyond`` it if the node answered
    that it had lost that one."""
    lost: PrefillHandle | DecodeHandle = node
    try:
        answer = await node.control.call(method, asked)
        lost = beyond or node
        return decode(reply, answer)
    except NodeLost as error:
        error.node = lost.info.name
        raise


async def _release(request: Request, pair: Pair) -> None:
    """Free both sides; a node that cannot be told is dead or will let its lease expire."""
    calls = (
        pair.decode.control.call("abort", pack(on_decode.Abort(request.request_id))),
        pair.prefill.control.call(
            "cancel", pack(on_prefill.Cancel(request.request_id, pair.attempt))
        ),
    )
    for call in calls:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await call
        except Exception as error:
            log.warning("release of %s failed: %s", request.request_id, error)
