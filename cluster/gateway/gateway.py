"""The cluster as one object: admits requests, routes them, and yields their answers.

A gateway owns no node. Several may serve one cluster; each has a session of its own with every
decode rank, which ends what it holds there should it die.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from cluster.gateway.affinity import PrefixAffinity
from cluster.gateway.answer import Answer
from cluster.gateway.fan_out import expand, merged
from cluster.gateway.fleet import Fleet, Members, Pair
from cluster.gateway.flow import run_request
from cluster.gateway.handles import Handle
from cluster.gateway.retries import Retries
from cluster.gateway.router import choose_route
from core.answer import Delta, Finished
from core.config import TandemConfig
from core.errors import HandoverError, NodeLost, Overloaded, Preempted
from core.identity import Identity, nonce
from core.info import SERVING, ModelInfo, NodeStatus, ServerStatus
from core.request import Request, SamplingParams
from core.schema import decode
from core.stopping import num_budget
from model.tokenizer import TextStream, Tokenizer

log = logging.getLogger(__name__)
STATUS_TIMEOUT_S = 2.0
WARM_UP_TOKENS = 3
LONGEST_BEAT_S = 1.0
Piece = Delta | Finished


@dataclass(slots=True)
class _Running:
    """The stream of one answer. While its reader holds a piece (not ``is_inside``) an abort must
    not cancel it: the cancellation would hit the reader."""

    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    is_inside: bool = False
    is_aborted: bool = False

    def abort(self) -> None:
        self.is_aborted = True
        if self.is_inside:
            self.scope.reschedule(asyncio.get_running_loop().time())


class ClusterGateway:
    """Build it inside a running asyncio loop; ``stop`` ends its background tasks."""

    def __init__(self, config: TandemConfig, tokenizer: Tokenizer, members: Members) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._model: ModelInfo | None = None
        self._affinity = PrefixAffinity()
        self._running: dict[str, list[_Running]] = {}
        self._num_open = 0
        beat_s = min(LONGEST_BEAT_S, config.kv_transfer.lease_s / 4)
        self.fleet = Fleet(members, nonce(), beat_s, self._warm)

    def model_info(self) -> ModelInfo:
        """What is served; the same for all lives of all ranks."""
        if self._model is None:
            self._model = next(iter(self.fleet.decodes.values())).info.model
        return self._model

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Deltas, then a Finished for each answer. Closing it early frees everything it holds.

        Raises what run_request raises, Overloaded when the queue is full, and ValueError for a
        request id that is running already.
        """
        if request.request_id in self._running:
            raise ValueError(f"request_id: {request.request_id!r} is already running; use another")
        self._running[request.request_id] = [_Running() for _ in range(request.sampling.n)]
        if request.sampling.seed is None:
            seeded = replace(request.sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=seeded)
        asked = expand(request)
        pieces = merged(asked, self._answer) if len(asked) > 1 else self._answer(0, *asked)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            del self._running[request.request_id]

    async def _answer(self, index: int, request: Request) -> AsyncGenerator[Piece, None]:
        """One answer of a request."""
        model = self.model_info()
        answer = Answer(
            request, TextStream(self.tokenizer), model.eos_token_ids, model.max_model_len
        )
        if answer.is_finished:
            yield answer.finished()
            return
        self._admit(request)
        running, piece = self._running[request.request_id][index], None
        self._num_open += 1
        pieces = self._serve(index, answer)
        try:
            async with running.scope, aclosing(pieces):
                running.is_inside = True
                if running.is_aborted:
                    running.abort()
                async for piece in pieces:
                    running.is_inside = False
                    yield piece
                    running.is_inside = True
                    if running.is_aborted and not answer.is_finished:
                        break
        except TimeoutError:
            if not running.scope.expired():
                raise
        finally:
            self._num_open -= 1
        if running.is_aborted and not isinstance(piece, Finished):
            yield answer.aborted()

    async def abort(self, request_id: str) -> bool:
        """End a request; its answers get a Finished with reason abort."""
        running = self._running.get(request_id, [])
        for one in running:
            one.abort()
        return request_id in self._running

    def is_healthy(self) -> bool:
        """A prefill and a decode rank are left that work together."""
        return bool(self.fleet.usable())

    async def status(self) -> ServerStatus:
        nodes = await asyncio.gather(*map(_node_status, self.fleet.handles()))
        return ServerStatus(SERVING, self.config.mode, len(self._running), tuple(nodes))

    async def stop(self) -> None:
        await self.fleet.stop()

    async def _warm(self, pair: Pair) -> None:
        """A tiny request over a pair of ranks."""
        sampling = SamplingParams(seed=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        request = Request(pair.identity.request_id, (0, 0), sampling=sampling)
        answer = Answer(
            request, TextStream(self.tokenizer), (), pair.decode.info.model.max_model_len
        )
        async for _ in run_request(request, pair, self.fleet.session, answer):
            pass

    def _admit(self, request: Request) -> None:
        """Refuse what no rank could ever hold, and more than may wait for the rows there are.

        What a prefill rank could not read again in full must not begin: it could not migrate.
        """
        infos = [handle.info for pair in self.fleet.usable() for handle in pair]
        num_rows = sum(d.info.max_rows for d in self.fleet.decodes.values())
        if self._num_open >= num_rows + self.config.server.max_queued:
            raise Overloaded(f"{self._num_open - num_rows} requests are queued already")
        num_prompt, sampling = len(request.prompt_ids), request.sampling
        most = num_prompt + num_budget(
            num_prompt, 0, sampling.max_tokens, self.model_info().max_model_len
        )
        room = min(((info.num_pages - 1) * info.page_size for info in infos), default=most)
        if most > room:
            raise ValueError(
                f"max_tokens: prompt and answer of up to {most} tokens do not fit the {room} that "
                "a rank has pages for; ask for fewer tokens or raise kv.num_pages"
            )

    async def _serve(self, index: int, answer: Answer) -> AsyncGenerator[Piece, None]:
        """Run the request, and what is left of it again, until it is answered.

        Preemption is no failure; lost ranks and broken hand-overs are tried again elsewhere, a
        few times. Who is found lost gets no more requests until it answers again.
        """
        retries, session = Retries(), self.fleet.session
        while not answer.is_finished:
            try:
                rest = answer.rest()
                pair = self._pair(rest, index)
                async with aclosing(run_request(rest, pair, session, answer)) as run:
                    async for piece in run:
                        retries.progressed()
                        yield piece
            except (Preempted, NodeLost, HandoverError) as error:
                if isinstance(error, NodeLost) and error.node is not None:
                    for handle in (pair.prefill, pair.decode):
                        if handle.name == error.node:
                            self.fleet.lose(handle, error)
                await retries.pause(error)

    def _pair(self, request: Request, index: int) -> Pair:
        token_ids = request.prompt_ids + request.output_ids
        usable = self.fleet.usable()
        loads = [(p.load(), d.load()) for p, d in usable]
        prefill, decode_rank = choose_route(loads, self._affinity.find(token_ids))
        self._affinity.remember(token_ids, prefill)
        return Pair(
            self.fleet.prefills[prefill],
            self.fleet.decodes[decode_rank],
            Identity(request.request_id, index),
        )


async def _node_status(handle: Handle) -> NodeStatus:
    info = handle.info
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            data = await handle.control.call("status", b"")
    except Exception as error:
        log.warning("%s gives no status: %r", info.name, error)
        return NodeStatus(info.name, info.kind, info.epoch, alive=False)
    return decode(NodeStatus, data)
