"""A whole cluster without Ray: real nodes, channels and frames in one process and one event
loop."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tandem.cluster.control.plan import plan_gangs
from tandem.cluster.gateway.fan_out import AnswerGroup
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.colocated_node import rank as colocated
from tandem.core.answer import Delta, Finished, Piece
from tandem.core.config import CheckpointConfig, SpeculationConfig, TandemConfig, load
from tandem.core.control import Control, InProcessControl
from tandem.core.errors import RankLost
from tandem.core.info import COLOCATED, DECODE, PREFILL
from tandem.core.membership import READY, Gang, Membership, RankSpec
from tandem.core.request import Request
from tandem.decode_node.service.rank import DecodeRank
from tandem.model.loaded import LoadedModel, load_model
from tandem.prefill_node.rank import PrefillRank
from tandem.runtime import parts
from tandem.runtime.gang.planner_server import PlannerServer
from tandem.text.tokenizer import Tokenizer

Rank = PrefillRank | DecodeRank | colocated.ColocatedRank
_epochs = count(100)
"""Epochs of all rigs. An epoch, and so a rank's name, never repeats."""
SPARED = ["speculation.profile_at_startup=false"]
"""Options of every rig. Profiling at startup would take longer than most answers here."""


_loaded: dict[tuple[CheckpointConfig, SpeculationConfig, bool], LoadedModel] = {}


def load_once(config: TandemConfig, kind: str, **options: Any) -> LoadedModel:
    """Load a model as load_model does, but share the weights between ranks that hold all experts.
    No rank writes to them."""
    key = config.model, config.speculation, kind == PREFILL
    section = config.of_kind(kind)
    assert (section.device, section.num_threads) == ("cpu", 1), "no key tells these apart"
    if section.dp_size > 1:
        return load_model(config, kind, **options)
    if key not in _loaded:
        _loaded[key] = load_model(config, kind)
    return _loaded[key]


def load_resident_model(spec: RankSpec, config: TandemConfig) -> parts.ResidentModel:
    with patch.object(parts, "load_model", load_once):
        return parts.load_resident_model(spec, config)


class LocalMembers:
    """A membership of the ranks in this process, which the test sets."""

    def __init__(self) -> None:
        self.membership = Membership((1, 0), proof_key=secrets.token_bytes(32))
        self.controls: dict[str, Control] = {}
        self.reports: list[tuple[str, int, str]] = []
        self._changed = asyncio.Event()

    def add(self, *ranks: Rank) -> None:
        """Add a gang of these ranks."""
        spec = ranks[0].spec
        for rank in ranks:
            self.controls[rank.spec.epoch_name] = InProcessControl(rank.handle, spec.epoch)
        infos = tuple(rank.info for rank in ranks)
        self.tell(*self.membership.gangs, Gang(spec.gang, spec.kind, spec.epoch, READY, infos))

    def remove(self, name: str) -> None:
        self.tell(*(g for g in self.membership.gangs if g.members[0].spec.epoch_name != name))

    def tell(self, *gangs: Gang) -> None:
        incarnation, counter = self.membership.version
        version = incarnation, counter + 1
        self.membership = replace(self.membership, version=version, gangs=gangs)
        self._changed.set()

    async def wait_for_change(self, after: tuple[int, int]) -> Membership:
        while self.membership.version <= after:
            self._changed.clear()
            await self._changed.wait()
        return self.membership

    def control(self, spec: RankSpec) -> Control:
        return self.controls[spec.epoch_name]

    def report(self, gang: str, epoch: int, reason: str) -> None:
        self.reports.append((gang, epoch, reason))

    def find_control(self, name: str, epoch: int) -> Control:
        if name not in self.controls:
            raise RankLost(f"{name} of epoch {epoch} is gone")
        return self.controls[name]


@dataclass
class Rig:
    """The parts of a running cluster, for tests to inspect."""

    config: TandemConfig
    members: LocalMembers
    gateway: ClusterGateway = field(init=False)
    prefills: list[PrefillRank] = field(default_factory=list)
    decodes: list[DecodeRank] = field(default_factory=list)
    begun: dict[str, AnswerGroup] = field(default_factory=dict)
    """Answers that ``generate`` has started, by request id."""

    async def start(self, *specs: RankSpec) -> list[Rank]:
        """Start one more gang and make it known to every gateway."""
        hub = PlannerServer(len(specs), "127.0.0.1") if len(specs) > 1 else None
        ranks = await asyncio.gather(*(self._start(spec, hub) for spec in specs))
        for rank in ranks:
            if isinstance(rank, PrefillRank | colocated.ColocatedRank):
                self.prefills.append(getattr(rank, "prefill", rank))
            if isinstance(rank, DecodeRank | colocated.ColocatedRank):
                self.decodes.append(getattr(rank, "decode", rank))
        self.members.add(*ranks)
        return list(ranks)

    async def _start(self, spec: RankSpec, hub: PlannerServer | None) -> Rank:
        memory = load_resident_model(spec, self.config)
        more: dict[str, Any] = {}
        if hub is not None:
            more |= {"rendezvous": hub.rendezvous, "planner_server": None if spec.rank else hub}
        if spec.kind == DECODE:
            more["find_control"] = self.members.find_control
        builder = {
            PREFILL: "tandem.prefill_node.rank",
            DECODE: "tandem.decode_node.service.rank",
            COLOCATED: "tandem.colocated_node.rank",
        }
        return await parts.start_rank(builder[spec.kind], spec, memory, **more)

    async def generate(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Answer a request as the server does."""
        streams = self.begun[request.request_id] = self.gateway.start_answers(request)
        async with aclosing(streams.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    async def complete(self, request: Request) -> tuple[list[int], str, Finished]:
        """Return the token ids, the text and the last message of one request."""
        ids: list[int] = []
        text = ""
        async with aclosing(self.generate(request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Delta):
                    ids += piece.token_ids
                    text += piece.text
                else:
                    return ids, text, piece
        raise AssertionError("the stream ended without a Finished")

    async def settle(self) -> None:
        """Wait until background releases are done."""
        for decode in self.decodes:
            await decode.kv_receiver.idle()
        for prefill in self.prefills:
            await prefill.source.idle()
        for rank in (*self.prefills, *self.decodes):
            await rank.loop.call(lambda: None)
            await rank.loop.call(lambda: None)

    async def check_empty(self) -> None:
        """Check that no part holds anything of any request. Channels stay open."""
        await self.settle()
        for prefill in self.prefills:
            counts = prefill.source.counts()
            assert counts | {"channels": 0} == dict.fromkeys(counts, 0), counts
            prefill.engine.scheduler.check_integrity()
            prefill.source._endpoint.staging.check_integrity()
            assert not prefill.engine.scheduler.sequences
        for decode in self.decodes:
            counts = decode.kv_receiver.counts()
            assert counts | {"channels": 0} == dict.fromkeys(counts, 0), counts
            decode.engine.scheduler.check_integrity()
            decode.sessions.check_integrity()
            assert not decode.engine.scheduler.sequences
            assert not decode.engine.scheduler.num_waiting
            assert not len(decode.sessions), "a session holds what no scheduler does"
        for pool in [rank.pool for rank in (*self.prefills, *self.decodes)]:
            assert pool.num_available == pool.num_pages - 1, "pages leaked"


@asynccontextmanager
async def rig(path: Path, *sets: str) -> AsyncIterator[Rig]:
    """Start the nodes that ``--set`` items select, over the checkpoint in ``path``."""
    config = load(None, [f"model.path={path}", "model.dtype=float32", *SPARED, *sets])
    cluster = Rig(config, LocalMembers())
    async with AsyncExitStack() as stack:
        for plan in plan_gangs(config):
            ranks = await cluster.start(*plan.specs(next(_epochs), ["127.0.0.1"] * plan.num_ranks))
            stack.push_async_callback(stop_all, ranks)
        cluster.gateway = await stack.enter_async_context(gateway(cluster))
        yield cluster


async def stop_all(ranks: Sequence[Rank]) -> None:
    """Stop the ranks of a gang together: the epoch is over for all once one has stopped."""
    await asyncio.gather(*(rank.stop() for rank in ranks))


@asynccontextmanager
async def gateway(cluster: Rig) -> AsyncIterator[ClusterGateway]:
    """Start another gateway of the cluster and wait until it is warm."""
    made = ClusterGateway(cluster.config, Tokenizer(cluster.config.model.path), cluster.members)
    try:
        await made.fleet.wait_until_warm()
        yield made
    finally:
        await made.fleet.stop()
