"""The cluster as one object: admits requests, routes them, and yields their answers.

A gateway owns no node. Several may serve one cluster; each reads every decode node's frames.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from cluster.answer import Answer
from cluster.config import TandemConfig
from cluster.flow import Pair, run_request
from cluster.info import SERVING, ModelInfo, NodeStatus, ServerStatus
from cluster.nodes import DecodeHandle, FramePump, PrefillHandle
from cluster.router import choose_route
from core import node as core_node
from core.errors import Overloaded
from core.failure import decode
from core.request import Delta, Finished, Request, SamplingParams
from model.tokenizer import TextStream, Tokenizer

STATUS_TIMEOUT_S = 2.0
WARM_UP_TOKENS = 3


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
        self._lost: set[str] = set()
        self._running: dict[str, asyncio.Timeout] = {}
        self._num_queued = 0
        self._rows = asyncio.Semaphore(sum(d.info.max_rows for d in decodes))
        self._pumps = [FramePump(handle, self._on_lost) for handle in decodes]

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
        )

    async def generate(self, request: Request) -> AsyncGenerator[Delta | Finished, None]:
        """Deltas, then one Finished. Closing it early frees everything the request holds.

        Raises what run_request raises, Overloaded when the queue is full, and ValueError for a
        request id that is running already.
        """
        if request.request_id in self._running:
            raise ValueError(f"request_id: {request.request_id!r} is already running; use another")
        if request.sampling.seed is None:
            seeded = replace(request.sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=seeded)
        model = self.model_info()
        answer = Answer(
            request, TextStream(self.tokenizer), model.eos_token_ids, model.max_model_len
        )
        scope = self._running[request.request_id] = asyncio.timeout(None)
        try:
            async with scope, self._admitted(), aclosing(self._serve(request, answer)) as pieces:
                async for piece in pieces:
                    yield piece
        except TimeoutError:
            if not scope.expired():
                raise
            yield answer.aborted()
        finally:
            del self._running[request.request_id]

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
        """End a request; its stream gets a Finished with reason abort."""
        scope = self._running.get(request_id)
        if scope is None:
            return False
        scope.reschedule(asyncio.get_running_loop().time())
        return True

    async def status(self) -> ServerStatus:
        handles: list[PrefillHandle | DecodeHandle] = [
            *self._prefills.values(),
            *self._decodes.values(),
        ]
        nodes = await asyncio.gather(*(self._node_status(handle) for handle in handles))
        return ServerStatus(SERVING, self.config.mode, len(self._running), tuple(nodes))

    async def stop(self) -> None:
        for pump in self._pumps:
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

    async def _serve(
        self, request: Request, answer: Answer
    ) -> AsyncGenerator[Delta | Finished, None]:
        route = choose_route(
            [p.load() for p in self._prefills.values()],
            [d.load() for d in self._decodes.values()],
            excluded=self._lost,
        )
        pair = Pair(self._prefills[route.prefill], self._decodes[route.decode])
        run = run_request(request, pair, answer)
        async with aclosing(run) as pieces:
            async for piece in pieces:
                yield piece

    async def _node_status(self, handle: PrefillHandle | DecodeHandle) -> NodeStatus:
        info = handle.info
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                data = await handle.control.call("status", b"")
        except Exception:
            return NodeStatus(info.name, info.kind, info.epoch, alive=False)
        now = decode(core_node.NodeStatus, data)
        return NodeStatus(
            name=now.name,
            kind=now.kind,
            epoch=now.epoch,
            alive=True,
            num_active_rows=now.num_active_rows,
            num_free_pages=now.num_free_pages,
            num_pages=now.num_pages,
            num_open_leases=now.num_open_leases,
            num_channels=now.num_channels,
            num_steps=now.num_steps,
        )

    def _on_lost(self, name: str, error: BaseException) -> None:
        self._lost.add(name)
