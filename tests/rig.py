"""A whole cluster without Ray: real nodes, real channels, one process, one asyncio loop."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.control import colocated
from cluster.control.plan import plan_nodes
from cluster.gateway.gateway import ClusterGateway
from cluster.gateway.nodes import DecodeHandle, Frames, PrefillHandle
from core.config import TandemConfig, load
from core.control import InProcessControl
from core.info import DECODE, PREFILL, NodeInfo
from core.request import Delta, Finished, Request
from decode_node import build as decode_build
from decode_node.build import DecodeRank
from model.tokenizer import Tokenizer
from prefill_node import build as prefill_build
from prefill_node.build import PrefillRank


@dataclass
class Rig:
    """The parts of a running cluster, for tests to look into."""

    config: TandemConfig
    gateway: ClusterGateway
    prefills: list[PrefillRank]
    decodes: list[DecodeRank]

    async def complete(self, request: Request) -> tuple[list[int], str, Finished]:
        """Token ids, text and the last message of one request."""
        ids: list[int] = []
        text = ""
        async with aclosing(self.gateway.generate(request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Delta):
                    ids += piece.token_ids
                    text += piece.text
                else:
                    return ids, text, piece
        raise AssertionError("the stream ended without a Finished")

    async def settle(self) -> None:
        """Wait until releases that go on in the background are done."""
        for decode in self.decodes:
            await decode.node.sink.idle()
        for prefill in self.prefills:
            await prefill.node.source._tasks.finish()
        for rank in (*self.prefills, *self.decodes):
            await rank.loop.call(lambda: None)
            await rank.loop.call(lambda: None)

    async def check_empty(self) -> None:
        """Nothing of any request is left anywhere; channels stay, they are warm."""
        await self.settle()
        for prefill in self.prefills:
            counts = prefill.node.source.counts()
            assert counts | {"channels": 0} == dict.fromkeys(counts, 0), counts
            prefill.engine.scheduler.check_integrity()
            prefill.node.source.check_integrity()
            assert not prefill.engine.scheduler.sequences
        for decode in self.decodes:
            counts = decode.node.sink.counts()
            assert counts | {"channels": 0} == dict.fromkeys(counts, 0), counts
            decode.engine.scheduler.check_integrity()
            assert not decode.engine.scheduler.sequences
        for rank in (*self.prefills, *self.decodes):
            pool = rank.engine.scheduler._pool
            assert pool.num_available == pool.num_pages - 1, "pages leaked"


@asynccontextmanager
async def rig(path: Path, *sets: str) -> AsyncIterator[Rig]:
    """Start the nodes that ``--set`` items ask for over the checkpoint in ``path``."""
    config = load(None, [f"model.path={path}", "model.dtype=float32", *sets])
    parts = Rig(config, None, [], [])  # type: ignore[arg-type]
    try:
        handles = await _start(config, parts)
        parts.gateway = ClusterGateway(config, Tokenizer(path), *handles)
        try:
            yield parts
        finally:
            await parts.gateway.stop()
    finally:
        for decode in parts.decodes:
            await decode.node.stop()
        for prefill in parts.prefills:
            await prefill.stop()
        for decode in parts.decodes:
            decode.loop.stop()


async def _start(
    config: TandemConfig, parts: Rig
) -> tuple[list[PrefillHandle], list[DecodeHandle]]:
    prefills: list[PrefillHandle] = []
    decodes: list[DecodeHandle] = []
    controls: dict[str, InProcessControl] = {}
    for plan in plan_nodes(config):
        if plan.spec.kind == PREFILL:
            prefill = await prefill_build.build(plan.spec, config)
            parts.prefills.append(prefill)
            controls[plan.spec.gang] = InProcessControl(prefill.node.handle)
            prefills.append(PrefillHandle(prefill.info, controls[plan.spec.gang]))
        elif plan.spec.kind == DECODE:
            decode = await decode_build.build(plan.spec, config, controls.__getitem__)
            parts.decodes.append(decode)
            control = InProcessControl(decode.node.handle)
            decodes.append(decode_handle(decode.info, control, decode))
        else:
            both = await colocated.build(plan.spec, config)
            parts.prefills.append(both.prefill)
            parts.decodes.append(both.decode)
            control = InProcessControl(both.handle)
            prefills.append(PrefillHandle(both.info, control))
            decodes.append(decode_handle(both.info, control, both.decode))
    return prefills, decodes


def decode_handle(info: NodeInfo, control: InProcessControl, rank: DecodeRank) -> DecodeHandle:
    async def reopen() -> Frames:
        return rank.node.frames

    return DecodeHandle(info, control, rank.node.frames, reopen)
