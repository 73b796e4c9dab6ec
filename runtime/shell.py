"""What every rank's actor is: a shell around a rank, bytes in and bytes out, no Ray in it."""

import asyncio
import faulthandler
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from tandem.core.config import TandemConfig
from tandem.core.config_shared import received
from tandem.core.errors import EpochEnded, RankLost, StepFailed
from tandem.core.membership import ExpertRows, Meeting, RankInfo, RankSpec, RankState
from tandem.core.pace import LOADING, on_start
from tandem.core.placement import Placement
from tandem.core.schema import encode_failure, failure_of, pack, unpack
from tandem.core.tasks import cancelled
from tandem.runtime.engine_loop import EngineLoop

log = logging.getLogger(__name__)
WEIGHTS_POLL_S = 5.0
"""Pause before a rank that found other weights than its cluster's looks at its files again."""


class Rank(Protocol):
    """A running rank as its shell sees it."""

    loop: EngineLoop

    @property
    def num_held(self) -> int:
        """Sequences that wait, run, or are leased."""

    @property
    def info(self) -> RankInfo: ...

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes: ...

    async def stop(self) -> None: ...


class RankShell:
    """Answers from its first moment on, also while the rank is being built.

    ``builder`` is the module whose ``build(parts, **links)`` makes the rank; it is imported only
    then, so that whoever creates the actor needs no torch. Of a gang of several ranks one process
    sees many lives: the weights stay, everything else begins anew.
    """

    builder: str
    links: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, spec: bytes, config_json: str, placement: bytes = b"") -> None:
        self._spec = unpack(RankSpec, spec)
        self._placement = unpack(Placement, placement) if placement else None
        self._memory: Any = None
        self._hub: Any = None
        self._rank: Rank | None = None
        self._loading: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._doing: tuple[str, float] | None = None
        self._cluster_weights = ""
        self._weights = ""
        self._waits = ""
        faulthandler.enable()  # its last words say whether a step killed it
        seen, log_path = (0, self._spec.epoch), _stderr_path()
        folder = os.path.dirname(log_path) or tempfile.gettempdir()
        box = f"{folder}/{self._spec.process}.{secrets.token_hex(16)}.box"  # none can foresee it
        digest = self._placement.digest if self._placement else ""
        self._state = RankState(
            self._spec, config_json, os.getpid(), log_path, seen, box_path=box, placement=digest
        )
        self._leaving = asyncio.Lock()

    async def load(self, spec: RankSpec, config: TandemConfig) -> Any:
        """Load what a rank keeps while its gang restarts (``Memory`` in runtime/parts.py)."""
        on_start.set(self._on_start)
        parts = await asyncio.to_thread(import_module, "tandem.runtime.parts")
        return await asyncio.to_thread(
            parts.load_memory, spec, config, self._placement, self._check_weights
        )

    async def begin(self, spec: RankSpec, memory: Any, meeting: Meeting | None) -> Rank:
        parts = import_module("tandem.runtime.parts")
        given = spec, memory, meeting, self._hub, self._state.box_path
        return await parts.start_rank(self.builder, *given, **self.links)

    async def host(self) -> bytes:
        """Rank 0 opens a life of its gang: the packed Meeting that its ranks are to join."""
        await self.leave()
        hub = import_module("tandem.runtime.gang.hub")
        self._hub = hub.Hub(self._spec.num_ranks, self._spec.host)
        return pack(self._hub.meeting)

    async def join(self, spec: bytes, meeting: bytes) -> None:
        """Begin to live as ``spec`` says; ``who`` tells when the rank is ready."""
        if self._state.is_joined or self._rank is not None:
            await self.leave()
        told, where = unpack(RankSpec, spec), unpack(Meeting, meeting)
        seen = self._state.seen[0], max(self._state.seen[1], told.epoch)
        self._spec = told
        self._state = replace(self._state, spec=told, seen=seen, is_joined=True, ended=None)
        self._joining = asyncio.create_task(self._join(where))

    async def leave(self) -> None:
        """Void rows, leases and channels; process and weights stay. Returns when nothing of this
        life runs any more, and raises RankLost if that cannot be brought about."""
        async with self._leaving:  # a controller may die over it, and the next one ask for it too
            if self._joining is not None:
                await cancelled(self._joining)
            if self._hub is not None:
                self._hub.close()
            if self._rank is not None:
                await self._rank.stop()
                if self._rank.loop.is_running:
                    raise RankLost(f"{self._spec.life}: its engine does not stop")
            self._joining = self._hub = self._rank = None
            self._state = replace(self._state, is_joined=False, info=None, pace=None, ended=None)

    async def who(self, incarnation: int = 0, epoch: int = 0, weights: str | None = None) -> bytes:
        """Packed RankState; the rank remembers the largest numbers that it is told. The first call
        begins to load it: a rank that has no peers goes on to be ready, others wait to be told to
        join. One whose engine has stopped has failed.

        ``weights`` is the digest of its cluster's weights, "" if no rank holds any, None from a
        caller that does not know.
        """
        self._cluster_weights = self._cluster_weights if weights is None else weights
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        seen = max(self._state.seen[0], incarnation), max(self._state.seen[1], epoch)
        doing, progress = self._doing or ("importing torch", float(len(sys.modules)))
        self._state = replace(
            self._state,
            seen=seen,
            doing=doing,
            progress=progress,
            weights=self._weights,
            waits=self._waits,
        )
        if self._rank is not None:
            pace, num_held = self._rank.loop.watch.pace(), self._rank.num_held
            self._state = replace(self._state, pace=pace, num_held=num_held)
            if (error := self._rank.loop.failure) is not None:
                is_over = isinstance(error, EpochEnded)
                self._fail(error if is_over else StepFailed(f"the engine stopped: {error!r}"))
        return pack(self._state)

    async def call(self, epoch: int, method: str, payload: bytes) -> bytes:
        """The rank's answer, or a packed RankLost when another life of it is meant."""
        if self._rank is None:
            return encode_failure(RankLost(f"{self._spec.life} is not ready"))
        return await self._rank.handle(epoch, method, payload)

    async def expert_rows(self) -> bytes:
        """Packed ExpertRows of a loaded rank of a gang of several."""
        assert self._memory is not None and self._spec.num_ranks > 1, "it has nothing to tell"
        loaded = self._memory.loaded
        sent = loaded.dispatch.sent
        rows = sent() if self._rank is None else await self._rank.loop.call(sent)
        told = tuple(map(tuple, rows)), loaded.dispatch.placement, loaded.config.n_group
        return pack(ExpertRows(*told))

    async def placement(self) -> bytes:
        """The packed Placement that it was begun with."""
        return pack(self._placement)

    async def stop(self) -> None:
        """End the rank in order, if there is one; its process is for others to end. They may die
        before they do: who finds it then finds a life that is over."""
        if self._rank is not None:
            self._fail(RankLost(f"{self._spec.life} was told to stop"))
            await self._rank.stop()
            self._rank.loop.box.close()

    def _fail(self, error: BaseException) -> None:
        """This life of it is over, or the rank has failed for good."""
        before, told, is_over = self._state, failure_of(error), isinstance(error, EpochEnded)
        self._state = replace(before, ended=told) if is_over else replace(before, failure=told)

    async def _load(self) -> None:
        try:
            config = received(self._state.config_json)
            self._memory = await self._read(config)
            if self._spec.num_ranks == 1:
                await self._join(None)
            self._state = replace(self._state, is_loaded=True)
        except Exception as error:
            log.exception("%s cannot be built", self._spec.life)
            self._fail(error)

    async def _read(self, config: TandemConfig) -> Any:
        """Load as soon as the weights of the cluster lie under the configured path."""
        while True:
            try:
                return await self.load(self._spec, config)
            except ValueError as error:
                if not self._cluster_weights or self._weights:
                    raise
                self._waits = f"not loading: {error}"
            await asyncio.sleep(WEIGHTS_POLL_S)

    def _check_weights(self, found: str) -> None:
        """Accept weights of this digest. Raises ValueError with both if the cluster has others."""
        if self._cluster_weights not in ("", found):
            raise ValueError(
                f"model.path holds weights {found}, but this cluster has {self._cluster_weights}; "
                "put those back, or end the cluster with `tandem stop` and start it again"
            )
        self._on_start(LOADING, 0.0)  # first: a rank that waited for long begins to make progress
        self._weights = found
        self._waits = ""

    async def _join(self, meeting: Meeting | None) -> None:
        try:
            self._rank = rank = await self.begin(self._spec, self._memory, meeting)
            self._state = replace(self._state, info=rank.info)
        except Exception as error:
            if not isinstance(error, EpochEnded):
                log.exception("%s cannot be built", self._spec.life)
            self._fail(error)

    def _on_start(self, doing: str, progress: float) -> None:
        self._doing = doing, progress


def _stderr_path() -> str:
    path = "/proc/self/fd/2"
    return os.readlink(path) if os.path.exists(path) else ""
