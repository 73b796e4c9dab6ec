"""Base class of the ranks' actors: a shell around a rank, bytes in and bytes out, without Ray."""

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
from tandem.core.config_shared import parse_shared_config
from tandem.core.errors import EpochEnded, RankLost, StepFailed
from tandem.core.membership import ExpertRows, RankInfo, RankSpec, RankState, Rendezvous
from tandem.core.placement import Placement
from tandem.core.progress import LOADING, on_startup_progress
from tandem.core.schema import encode_failure, pack, to_failure, unpack
from tandem.core.tasks import cancel_and_wait
from tandem.runtime.engine_loop import EngineLoop

log = logging.getLogger(__name__)
WEIGHTS_POLL_S = 5.0
"""Seconds before a rank whose files hold other weights than its cluster's checks them again."""


class Rank(Protocol):
    """Interface of a running rank."""

    loop: EngineLoop

    @property
    def num_sequences(self) -> int:
        """Number of sequences that wait, run, or are leased."""

    @property
    def info(self) -> RankInfo: ...

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes: ...

    async def stop(self) -> None: ...


class RankActor:
    """Shell of a rank. It answers calls while the rank is still being built.

    ``builder`` is the module whose ``build(parts, **build_options)`` creates the rank. The module
    is imported only then, so that a process that creates actors does not need torch. The process of
    a rank in a larger gang serves many epochs: it keeps the weights and rebuilds the rest.
    """

    builder: str
    build_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, spec: bytes, config_json: str, placement: bytes = b"") -> None:
        self._spec = unpack(RankSpec, spec)
        self._placement = unpack(Placement, placement) if placement else None
        self._resident_model: Any = None
        self._planner_server: Any = None
        self._rank: Rank | None = None
        self._loading: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._activity: tuple[str, float] | None = None
        self._cluster_weights = ""
        self._weights = ""
        self._wait_reason = ""
        faulthandler.enable()  # its traceback shows whether a step crashed the process
        max_seen = (0, self._spec.epoch)
        log_path = _stderr_path()
        folder = os.path.dirname(log_path) or tempfile.gettempdir()
        journal_path = (
            f"{folder}/{self._spec.process_name}.{secrets.token_hex(16)}.journal"  # unpredictable
        )
        digest = self._placement.digest if self._placement else ""
        self._state = RankState(
            spec=self._spec,
            config_json=config_json,
            pid=os.getpid(),
            log_path=log_path,
            max_seen=max_seen,
            crash_journal_path=journal_path,
            placement=digest,
        )
        self._leaving = asyncio.Lock()

    async def load(self, spec: RankSpec, config: TandemConfig) -> Any:
        """Load the ``ResidentModel`` (runtime/parts.py), which the rank keeps across epochs."""
        on_startup_progress.set(self._on_start)
        parts = await asyncio.to_thread(import_module, "tandem.runtime.parts")
        return await asyncio.to_thread(
            parts.load_resident_model, spec, config, self._placement, self._check_weights
        )

    async def start_epoch(
        self, spec: RankSpec, resident_model: Any, rendezvous: Rendezvous | None
    ) -> Rank:
        parts = import_module("tandem.runtime.parts")
        arguments = (
            spec,
            resident_model,
            rendezvous,
            self._planner_server,
            self._state.crash_journal_path,
        )
        return await parts.start_rank(self.builder, *arguments, **self.build_options)

    async def open_rendezvous(self) -> bytes:
        """Start the planner of a new epoch on rank 0; return the packed Rendezvous."""
        await self.leave()
        planner_server = import_module("tandem.runtime.gang.planner_server")
        self._planner_server = planner_server.PlannerServer(self._spec.num_ranks, self._spec.host)
        return pack(self._planner_server.rendezvous)

    async def join(self, spec: bytes, rendezvous: bytes) -> None:
        """Start to join the epoch of ``spec``. ``get_state`` reports when the rank is ready."""
        if self._state.is_joined or self._rank is not None:
            await self.leave()
        rank_spec = unpack(RankSpec, spec)
        where = unpack(Rendezvous, rendezvous)
        max_seen = self._state.max_seen[0], max(self._state.max_seen[1], rank_spec.epoch)
        self._spec = rank_spec
        self._state = replace(
            self._state, spec=rank_spec, max_seen=max_seen, is_joined=True, epoch_end_cause=None
        )
        self._joining = asyncio.create_task(self._join(where))

    async def leave(self) -> None:
        """Leave the epoch: void rows, leases and channels; keep process and weights.

        Returns when nothing of this epoch runs any more. Raises RankLost if the engine does not
        stop.
        """
        async with self._leaving:  # a restarted controller may call this again
            if self._joining is not None:
                await cancel_and_wait(self._joining)
            if self._planner_server is not None:
                self._planner_server.close()
            if self._rank is not None:
                await self._rank.stop()
                if self._rank.loop.is_running:
                    raise RankLost(f"{self._spec.epoch_name}: its engine does not stop")
            self._joining = self._planner_server = self._rank = None
            self._state = replace(
                self._state, is_joined=False, info=None, engine_progress=None, epoch_end_cause=None
            )

    async def get_state(
        self, incarnation: int = 0, epoch: int = 0, weights: str | None = None
    ) -> bytes:
        """Return the packed RankState.

        The first call starts loading. A rank without peers then becomes ready by itself; others
        wait for ``join``. A rank whose engine has stopped has failed, unless only its epoch is
        over. The rank remembers the largest numbers that it has received.

        Args:
            incarnation: Incarnation of the controller.
            epoch: Latest epoch of the controller.
            weights: Digest of the cluster's weights, "" if no rank holds any, None if unknown.
        """
        self._cluster_weights = self._cluster_weights if weights is None else weights
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        max_seen = max(self._state.max_seen[0], incarnation), max(self._state.max_seen[1], epoch)
        activity, progress = self._activity or ("importing torch", float(len(sys.modules)))
        self._state = replace(
            self._state,
            max_seen=max_seen,
            activity=activity,
            progress=progress,
            weights=self._weights,
            wait_reason=self._wait_reason,
        )
        if self._rank is not None:
            engine_progress = self._rank.loop.stall_detector.measure_progress()
            num_held = self._rank.num_sequences
            self._state = replace(
                self._state, engine_progress=engine_progress, num_sequences=num_held
            )
            if (error := self._rank.loop.failure) is not None:
                is_over = isinstance(error, EpochEnded)
                self._fail(error if is_over else StepFailed(f"the engine stopped: {error!r}"))
        return pack(self._state)

    async def call(self, epoch: int, method: str, payload: bytes) -> bytes:
        """Return the rank's reply, or a packed RankLost if ``epoch`` is not its epoch."""
        if self._rank is None:
            return encode_failure(RankLost(f"{self._spec.epoch_name} is not ready"))
        return await self._rank.handle(epoch, method, payload)

    async def expert_rows(self) -> bytes:
        """Return packed ExpertRows. Requires a loaded rank in a gang of several."""
        assert self._resident_model is not None and self._spec.num_ranks > 1, (
            "the rank has no expert rows to report"
        )
        loaded = self._resident_model.loaded
        sent = loaded.dispatch.num_sent_rows
        rows = sent() if self._rank is None else await self._rank.loop.call(sent)
        expert_rows = tuple(map(tuple, rows)), loaded.dispatch.placement, loaded.config.n_group
        return pack(ExpertRows(*expert_rows))

    async def placement(self) -> bytes:
        """Return the packed Placement with which the process was started."""
        return pack(self._placement)

    async def stop(self) -> None:
        """Stop the rank in order, if there is one. The process is left for the caller to end.

        The rank is marked as failed first. If the caller dies before it ends the process, the next
        controller finds an epoch that is over.
        """
        if self._rank is not None:
            self._fail(RankLost(f"{self._spec.epoch_name} was stopped"))
            await self._rank.stop()
            self._rank.loop.crash_journal.close()

    def _fail(self, error: BaseException) -> None:
        """Record the end of the epoch, or the permanent failure of the rank."""
        before = self._state
        failure = to_failure(error)
        is_over = isinstance(error, EpochEnded)
        self._state = (
            replace(before, epoch_end_cause=failure)
            if is_over
            else replace(before, failure=failure)
        )

    async def _load(self) -> None:
        try:
            config = parse_shared_config(self._state.config_json)
            self._resident_model = await self._read(config)
            if self._spec.num_ranks == 1:
                await self._join(None)
            self._state = replace(self._state, is_loaded=True)
        except Exception as error:
            log.exception("%s cannot be built", self._spec.epoch_name)
            self._fail(error)

    async def _read(self, config: TandemConfig) -> Any:
        """Load the model as soon as the configured path holds the weights of the cluster."""
        while True:
            try:
                return await self.load(self._spec, config)
            except ValueError as error:
                if not self._cluster_weights or self._weights:
                    raise
                self._wait_reason = f"not loading: {error}"
            await asyncio.sleep(WEIGHTS_POLL_S)

    def _check_weights(self, found: str) -> None:
        """Accept weights of digest ``found``.

        Raises ValueError naming both digests if the cluster has other weights.
        """
        if self._cluster_weights not in ("", found):
            raise ValueError(
                f"model.path holds weights {found}, but this cluster has {self._cluster_weights}; "
                "put those back, or end the cluster with `tandem stop` and start it again"
            )
        self._on_start(LOADING, 0.0)  # first, because the wait must not count as a stall
        self._weights = found
        self._wait_reason = ""

    async def _join(self, rendezvous: Rendezvous | None) -> None:
        try:
            self._rank = rank = await self.start_epoch(self._spec, self._resident_model, rendezvous)
            self._state = replace(self._state, info=rank.info)
        except Exception as error:
            if not isinstance(error, EpochEnded):
                log.exception("%s cannot be built", self._spec.epoch_name)
            self._fail(error)

    def _on_start(self, activity: str, progress: float) -> None:
        self._activity = activity, progress


def _stderr_path() -> str:
    path = "/proc/self/fd/2"
    return os.readlink(path) if os.path.exists(path) else ""
