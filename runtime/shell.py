"""What every rank's actor is: a shell around a rank, bytes in and bytes out, no Ray in it."""

import asyncio
import faulthandler
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from core.config import TandemConfig
from core.errors import NodeLost, StepFailed
from core.membership import NodeInfo, RankSpec, RankState
from core.schema import encode_failure, failure_of, pack, unpack
from runtime.engine_loop import EngineLoop

log = logging.getLogger(__name__)


class Rank(Protocol):
    """A running rank as its shell sees it."""

    loop: EngineLoop

    @property
    def info(self) -> NodeInfo: ...

    async def handle(self, epoch: int, method: str, payload: bytes) -> bytes: ...

    async def stop(self) -> None: ...


class RankShell:
    """Answers from its first moment on, also while the rank is being built.

    ``builder`` is the module whose ``build(parts, **links)`` makes the rank; it is imported only
    then, so that whoever creates the actor needs no torch.
    """

    builder: str
    links: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, spec: bytes, config_json: str) -> None:
        self._spec = unpack(RankSpec, spec)
        self._rank: Rank | None = None
        self._building: asyncio.Task[None] | None = None
        self._progress = 0.0
        faulthandler.enable()  # its last words say whether a step killed it
        seen, log_path = (0, self._spec.epoch), _stderr_path()
        box = os.path.join(os.path.dirname(log_path) or tempfile.gettempdir(), self._spec.name)
        self._state = RankState(
            self._spec, config_json, os.getpid(), log_path, seen, box_path=f"{box}.box"
        )

    async def build(self, spec: RankSpec, config: TandemConfig) -> Rank:
        parts = await asyncio.to_thread(import_module, "runtime.parts")
        told: dict[str, Any] = {"on_loaded": self._on_loaded, "box_path": self._state.box_path}
        return await parts.start_rank(self.builder, spec, config, **told, **self.links)

    async def start(self) -> None:
        """Begin to build the rank, once; ``who`` tells how far that is."""
        if self._building is None:
            self._building = asyncio.create_task(self._build())

    async def who(self, incarnation: int = 0, epoch: int = 0) -> bytes:
        """Packed RankState; the rank remembers the largest numbers that it is told. One whose
        engine has stopped has failed."""
        seen = self._state.seen
        seen = (max(seen[0], incarnation), max(seen[1], epoch))
        self._state = replace(self._state, seen=seen, progress=self._progress)
        if self._rank is not None:
            self._state = replace(self._state, pace=self._rank.loop.watch.pace())
            if (error := self._rank.loop.failure) is not None:
                lost = failure_of(StepFailed(f"the engine stopped: {error!r}"))
                self._state = replace(self._state, failure=lost)
        return pack(self._state)

    async def call(self, epoch: int, method: str, payload: bytes) -> bytes:
        """The rank's answer, or a packed NodeLost when another life of it is meant."""
        if self._rank is None:
            return encode_failure(NodeLost(f"{self._spec.name} is not ready"))
        return await self._rank.handle(epoch, method, payload)

    async def stop(self) -> None:
        """End the rank in order, if there is one; its process is for others to end."""
        if self._rank is not None:
            await self._rank.stop()
            self._rank.loop.box.close()

    async def _build(self) -> None:
        try:
            config = TandemConfig.model_validate_json(self._state.config_json)
            self._rank = rank = await self.build(self._spec, config)
            self._state = replace(self._state, info=rank.info)
        except Exception as error:
            log.exception("%s cannot be built", self._spec.name)
            self._state = replace(self._state, failure=failure_of(error))

    def _on_loaded(self, share: float) -> None:
        self._progress = share


def _stderr_path() -> str:
    path = "/proc/self/fd/2"
    return os.readlink(path) if os.path.exists(path) else ""
