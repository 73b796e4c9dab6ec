"""Base class of the rank actors. Its methods take and return bytes, and it does not need Ray."""

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
"""Seconds between two checks of the weight files by a rank whose files differ from the weights of
its cluster."""


class Rank(Protocol):
    """Interface of a running rank."""

    loop: EngineLoop

    @property
    def num_sequences(self) -> int:
        """Number of sequences that wait, run, or are leased to a decode rank."""

    @property
    def info(self) -> RankInfo: ...

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes: ...

    async def stop(self) -> None: ...


class RankActor:
    """Holds a rank, and answers calls while the rank is still being built.

    ``builder`` is the module whose ``build(parts, **build_options)`` creates the rank. The actor
    imports the module only to build the rank. A process that creates actors therefore does not need
    torch.

    The process of a rank in a gang of several ranks serves many epochs. For each epoch it keeps the
    weights and rebuilds the rest.
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
        """End the current epoch and start the planner of a new one; return the packed Rendezvous.

        Called on rank 0 only.
        """
        await self.leave()
        planner_server = import_module("tandem.runtime.gang.planner_server")
        self._planner_server = planner_server.PlannerServer(self._spec.num_ranks, self._spec.host)
        return pack(self._planner_server.rendezvous)

    async def join(self, spec: bytes, rendezvous: bytes) -> None:
        """Start to join the epoch of ``spec`` in the background; ``get_state`` shows progress."""
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
        """Leave the epoch: end its rows, leases and channels, but keep the process and the weights.

        Returns when nothing of this epoch runs any more. Raises RankLost if the engine does not
        stop.
        """
        async with self._leaving:  # a restarted controller may repeat the call
            if self._joining is not None:
                await cancel_and_wait(self._joining)
            if self._planner_server is not None:
                self._planner_server.close()
            if self._rank is not None:
                await self._rank.stop()
                if self._rank.loop.is_running:
                    raise RankLost(f"{self._spec.epoch_name}: the engine did not stop")
            self._joining = self._planner_server = self._rank = None
            self._state = replace(
                self._state, is_joined=False, info=None, engine_progress=None, epoch_end_cause=None
            )

    async def get_state(
        self, incarnation: int = 0, epoch: int = 0, weights: str | None = None
    ) -> bytes:
        """Return the packed RankState.

        The first call starts to load the model. After that, the only rank of a gang becomes ready
        by itself; others wait for ``join``. If the engine has stopped, the state says why: the
        epoch is over, or the rank has failed permanently. ``max_seen`` holds the largest arguments
        received so far.

        Args:
            incarnation: Number of the controller's incarnation.
            epoch: Latest epoch that the controller knows.
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
                self._fail(
                    error
                    if is_over
                    else StepFailed(f"{self._spec.epoch_name}: the engine stopped: {error!r}")
                )
        return pack(self._state)

    async def call(self, epoch: int, method: str, payload: bytes) -> bytes:
        """Pass a call on to the rank and return its reply.

        The reply is a packed RankLost if the rank is not ready or ``epoch`` is not its epoch.
        """
        if self._rank is None:
            return encode_failure(RankLost(f"{self._spec.epoch_name} is not ready"))
        return await self._rank.handle(epoch, method, payload)

    async def expert_rows(self) -> bytes:
        """Return packed ExpertRows. Requires a loaded rank in a gang of several ranks."""
        assert self._resident_model is not None and self._spec.num_ranks > 1, (
            "only a loaded rank of a gang of several ranks has expert rows"
        )
        loaded = self._resident_model.loaded
        sent = loaded.dispatch.num_sent_rows
        rows = sent() if self._rank is None else await self._rank.loop.call(sent)
        expert_rows = tuple(map(tuple, rows)), loaded.dispatch.placement, loaded.config.n_group
        return pack(ExpertRows(*expert_rows))

    async def placement(self) -> bytes:
        """Return the packed expert Placement with which the process was started."""
        return pack(self._placement)

    async def stop(self) -> None:
        """Stop the rank cleanly, if there is one. The caller must end the process.

        The rank is marked as failed first. If the caller dies before it ends the process, the next
        controller thus finds a failed rank.
        """
        if self._rank is not None:
            self._fail(RankLost(f"{self._spec.epoch_name} was stopped"))
            await self._rank.stop()
            self._rank.loop.crash_journal.close()

    def _fail(self, error: BaseException) -> None:
        """Record ``error``: EpochEnded as the end of the epoch, any other as the rank's failure."""
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
            log.exception("%s failed to start", self._spec.epoch_name)
            self._fail(error)

    async def _read(self, config: TandemConfig) -> Any:
        """Load the model; while the configured path holds other weights than the cluster, retry."""
        while True:
            try:
                return await self.load(self._spec, config)
            except ValueError as error:
                if not self._cluster_weights or self._weights:
                    raise
                self._wait_reason = f"not loading: {error}"
            await asyncio.sleep(WEIGHTS_POLL_S)

    def _check_weights(self, found: str) -> None:
        """Accept weights with the digest ``found``.

        Raises ValueError, which names both digests, if the cluster has other weights.
        """
        if self._cluster_weights not in ("", found):
            raise ValueError(
                f"model.path: has weights with digest {found}, but this cluster serves digest "
                f"{self._cluster_weights}; restore those weights, or stop the cluster with `tandem "
                "stop` and start it again"
            )
        self._on_start(LOADING, 0.0)  # first: the wait before it is not a stall
        self._weights = found
        self._wait_reason = ""

    async def _join(self, rendezvous: Rendezvous | None) -> None:
        try:
            self._rank = rank = await self.start_epoch(self._spec, self._resident_model, rendezvous)
            self._state = replace(self._state, info=rank.info)
        except Exception as error:
            if not isinstance(error, EpochEnded):
                log.exception("%s failed to start its epoch", self._spec.epoch_name)
            self._fail(error)

    def _on_start(self, activity: str, progress: float) -> None:
        self._activity = activity, progress


def _stderr_path() -> str:
    path = "/proc/self/fd/2"
    return os.readlink(path) if os.path.exists(path) else ""
