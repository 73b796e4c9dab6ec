"""What either end of hand-overs works with: a rank's KV, its threads, staging and wire."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tandem.core.config import KvTransferConfig
from tandem.core.errors import HandoverError
from tandem.core.tasks import Tasks, cancel_and_wait
from tandem.kv_transfer.caches import PagedCaches, check_chunks
from tandem.kv_transfer.channel import ChannelFactory
from tandem.kv_transfer.staging import StagingPool

Result = TypeVar("Result")
CLOSE_TIMEOUT_S = 5.0
"""Leases and sweeps tell a peer too, and who leaves a gang has ten seconds."""


class EngineThread(Protocol):
    """Runs posted functions one after the other, between two steps, until it is told to fail, which
    ends the rank (runtime/engine_loop.py)."""

    def post(self, function: Callable[[], Result]) -> "Future[Result]": ...

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """A long poll is answered within ``wait_s``; any call within ``call_s`` more. A pull fails
    once nothing new was computed for ``progress_s``; waiting for prefill to begin is no part
    of it as soon as prefill knows of the prompt.

    A chunk waits ``staging_s`` for staging of D's. A channel that was not used for ``idle_s`` is
    dropped by D, after twice that by P. Staging ought to leave quarantine within ``quarantine_s``.
    """

    wait_s: float = 5.0
    call_s: float = 10.0
    progress_s: float = 120.0
    staging_s: float = 600.0
    idle_s: float = 300.0
    quarantine_s: float = 120.0


@dataclass(eq=False)
class TransferEndpoint:
    """One end's parts; belongs to one Source or Sink. ``tasks`` outlive the calls that began
    them, ``staging`` is all that the wire touches, and ``copier`` the one thread that copies
    between it and pages."""

    caches: PagedCaches
    engine: EngineThread
    channel_factory: ChannelFactory
    config: KvTransferConfig
    deadlines: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        check_chunks(self.caches.layout, self.config.chunk_bytes)
        self.tasks = Tasks()
        self.copier = ThreadPoolExecutor(1, "kv-copies")
        self.staging = StagingPool(
            self.config.staging_bytes,
            self.config.chunk_bytes,
            pin=self.caches.device.type == "cuda" and self.channel_factory.device == "cpu",
            device=self.channel_factory.device,
        )

    def check_staging(self) -> None:
        """End the rank when more than half of it is late to leave quarantine: the backend hangs."""
        late = self.staging.num_quarantined(self.deadlines.quarantine_s)
        if late > self.staging.num_buffers // 2:
            self.engine.fail(HandoverError(f"{late} staging buffers do not leave quarantine"))

    async def close(self) -> None:
        """What is said to a peer that is silent, as that one hangs up, is cut off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.tasks.finish()
        while self.tasks:  # what is cancelled may start what says so
            await cancel_and_wait(*self.tasks)
        self.copier.shutdown(wait=False)
