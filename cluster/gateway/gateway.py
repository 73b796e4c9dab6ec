"""The cluster as one object: admits requests, routes them, and yields their answers.

A gateway owns no node. Several may serve one cluster; each reads every decode node's frames.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace

from cluster.gateway.affinity import PrefixAffinity
from cluster.gateway.answer import Answer
from cluster.gateway.fan_out import expand, merged
from cluster.gateway.flow import Pair, run_request
from cluster.gateway.nodes import DecodeHandle, FramePump, PrefillHandle
from cluster.gateway.outages import Outages
from cluster.gateway.retries import Retries
from cluster.gateway.router import DecodeLoad, PrefillLoad, choose_route, usable_pairs
from cluster.info import SERVING, ModelInfo, NodeStatus, ServerStatus
from core import info as core_node
from core.config import TandemConfig
from core.errors import HandoverError, NodeLost, Overloaded, Preempted
from core.request import Delta, Finished, Request, SamplingParams
from core.schema import decode
from model.tokenizer import TextStream, Tokenizer

log = logging.getLogger(__name__)
STATUS_TIMEOUT_S = 2.0
WARM_UP_TOKENS = 3


@dataclass(slots=True)
class _Running:
    """A request's stream. While its reader holds a piece (not ``is_inside``) an abort must not
    cancel it: the cancellation would hit the reader."""

    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    is_inside: bool = True
    is_aborted: bool = False

    def abort(self) -> None:
        self.is_aborted = True
        if self.is_inside:
            self.scope.reschedule(asyncio.get_running_loop().time())


class ClusterGateway:
    """Build it inside a running asyncio loop; ``stop`` ends its background tasks."""

    def __init__(
        self,
        config: TandemConfig,
        tokenizer: Tokenizer,
        prefills: Sequence[PrefillHandle],
        decodes: Sequence[DecodeHandle],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._prefills = {handle.info.name: handle for handle in prefills}
        self._decodes = {handle.info.name: handle for handle in decodes}
        self._outages = Outages(self._recover)
        self._affinity = PrefixAffinity()
        self._running: dict[str, _Running] = {}
        self._num_queued = 0
        self._rows = asyncio.Semaphore(sum(d.info.max_rows for d in decodes))
        self._pumps = {name: FramePump(h, self._on_lost) for name, h in self._decodes.items()}

    @property
    def handles(self) -> list[PrefillHandle | DecodeHandle]:
        return [*self._prefills.values(), *self._decodes.values()]

    def model_info(self) -> ModelInfo:
        info = next(iter(self._decodes.values())).info
        return ModelInfo(
            name=self.config.model.path.name,
            architecture=info.architecture,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_ids,
            num_draft_tokens=info.num_drafts,
            has_mtp=info.has_mtp,
            dtype=info.dtype,
            think_token_ids=info.think_ids or (),
        )

    def generate(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Deltas, then a Finished for each answer. Closing it early frees everything it holds.

        Raises what run_request raises, Overloaded when the queue is full, and ValueError for a
        request id that is running already.
        """
        if request.sampling.seed is None:
            seeded = replace(request.sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=seeded)
        if request.sampling.n > 1:
            return merged(expand(request), self._generate)
        return self._generate(request)

    async def _generate(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        if request.request_id in self._running:
            raise ValueError(f"request_id: {request.request_id!r} is already running; use another")
        model = self.model_info()
        answer = Answer(
            request, TextStream(self.tokenizer), model.eos_token_ids, model.max_model_len
        )
        if answer.is_finished:
            yield answer.finished()
            return
        running = self._running[request.request_id] = _Running()
        pieces, piece = self._serve(answer), None
        try:
            async with running.scope, self._admitted(), aclosing(pieces):
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
            del self._running[request.request_id]
        if running.is_aborted and not isinstance(piece, Finished):
            yield answer.aborted()

    async def warm_up(self) -> None:
        """Send one tiny request over every pair of nodes: channels and first calls are slow,
        and no user shall wait for them."""
        for prefill in self._prefills.values():
            for decode_node in self._decodes.values():
                if prefill.info.fingerprint == decode_node.info.fingerprint:
                    await self._warm(Pair(prefill, decode_node))

    async def _warm(self, pair: Pair) -> None:
        name = f"warm-up {pair.prefill.info.name} {pair.decode.info.name}"
        sampling = SamplingParams(seed=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        request = Request(name, (0, 0), sampling=sampling)
        model = self.model_info()
        answer = Answer(request, TextStream(self.tokenizer), (), model.max_model_len)
        async for _ in run_request(request, pair, answer):
            pass

    async def abort(self, request_id: str) -> bool:
        """End a request; its answers get a Finished with reason abort."""
        running = [
            running
            for name, running in self._running.items()
            if request_id in (name, name.rpartition(" ")[0])
        ]
        for one in running:
            one.abort()
        return bool(running)

    def is_healthy(self) -> bool:
        """A prefill and a decode node are left that cache alike."""
        prefills, decodes = self._loads()
        return bool(usable_pairs(prefills, decodes, self._outages.names))

    async def status(self) -> ServerStatus:
        nodes = await asyncio.gather(*(self._node_status(handle) for handle in self.handles))
        return ServerStatus(SERVING, self.config.mode, len(self._running), tuple(nodes))

    async def stop(self) -> None:
        await self._outages.stop()
        for pump in self._pumps.values():
            await pump.stop()

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Wait for a decode row, first come first served; refuse when too many wait."""
        if self._num_queued >= self.config.server.max_queued:
            raise Overloaded(f"{self._num_queued} requests are queued already")
        self._num_queued += 1
        try:
            await self._rows.acquire()
        finally:
            self._num_queued -= 1
        try:
            yield
        finally:
            self._rows.release()

    async def _serve(self, answer: Answer) -> AsyncGenerator[Delta | Finished, None]:
        """Run the request, and what is left of it again, until it is answered.

        Preemption is no failure; lost nodes and broken hand-overs are tried again elsewhere, a
        few times. Who is found lost gets no more requests until it answers again.
        """
        retries = Retries()
        while not answer.is_finished:
            try:
                async with aclosing(run_request(answer.rest(), self._pair(answer), answer)) as run:
                    async for piece in run:
                        yield piece
            except (Preempted, NodeLost, HandoverError) as error:
                if isinstance(error, NodeLost) and error.node is not None:
                    self._outages.add(self._handle(error.node), error)
                await retries.pause(error)

    def _pair(self, answer: Answer) -> Pair:
        request = answer.rest()
        token_ids = request.prompt_ids + request.output_ids
        preferred = self._affinity.find(token_ids)
        route = choose_route(*self._loads(), self._outages.names, preferred)
        self._affinity.remember(token_ids, route.prefill)
        return Pair(self._prefills[route.prefill], self._decodes[route.decode])

    def _handle(self, name: str) -> PrefillHandle | DecodeHandle:
        return self._prefills.get(name) or self._decodes[name]

    def _loads(self) -> tuple[list[PrefillLoad], list[DecodeLoad]]:
        prefills = [prefill.load() for prefill in self._prefills.values()]
        return prefills, [decode_node.load() for decode_node in self._decodes.values()]

    async def _node_status(self, handle: PrefillHandle | DecodeHandle) -> NodeStatus:
        info = handle.info
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                data = await handle.control.call("status", b"")
        except Exception as error:
            log.warning("%s gives no status: %r", info.name, error)
            return NodeStatus(info.name, info.kind, info.epoch, alive=False)
        now = decode(core_node.NodeStatus, data)
        return NodeStatus(alive=True, **asdict(now))

    def _on_lost(self, name: str, error: BaseException) -> None:
        self._outages.add(self._decodes[name], error)

    async def _recover(self, name: str) -> None:
        """Read a decode node's frames again if that broke; requests of then have been told."""
        pump = self._pumps.get(name)
        if pump is not None and pump.is_broken:
            handle = self._decodes[name]
            handle.frames = await handle.reopen()
            self._pumps[name] = FramePump(handle, self._on_lost)
