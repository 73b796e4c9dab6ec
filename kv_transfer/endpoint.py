"""Resources shared by all KV hand-overs of one rank: caches, threads, staging and channels."""

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
"""Maximum seconds that ``TransferEndpoint.close`` waits for background calls to peers.

A peer that does not receive its call detects the end later, by an expired lease or an idle channel.
This time is below the default of ``control.stop_timeout_s`` (10 s), after which a stopping rank is
killed.
"""


class EngineThread(Protocol):
    """Interface of the engine's thread (runtime/engine_loop.py).

    ``post`` queues a function, which runs between two steps. ``fail`` ends the rank.
    """

    def post(self, function: Callable[[], Result]) -> "Future[Result]": ...

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of hand-overs, in seconds.

    Attributes:
        wait_s: Maximum time that a prefill rank holds a long poll (messages.Pull).
        call_s: Maximum time of a control call, in addition to the time that the prefill rank may
            hold the call.
        progress_s: A pull fails when no new token was computed for this long. Time in the queue of
            the prefill rank does not count.
        staging_s: Maximum time that a chunk waits for a staging buffer of the decode rank.
        idle_s: The decode rank drops a channel that is unused for this long, the prefill rank after
            twice that time.
        quarantine_s: A staging buffer that is in quarantine for this long counts as stuck.
    """

    wait_s: float = 5.0
    call_s: float = 10.0
    progress_s: float = 120.0
    staging_s: float = 600.0
    idle_s: float = 300.0
    quarantine_s: float = 120.0


@dataclass(eq=False)
class TransferEndpoint:
    """Resources of one Source or Sink, which owns them.

    Attributes:
        tasks: Background tasks, which outlive the calls that started them.
        staging: Staging buffers, the only memory that channels access.
        copier: The single thread that copies between staging and pages.
    """

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
        """End the rank if over half of its staging buffers are stuck in quarantine.

        The backend then hangs: it does not end its failed transfers.
        """
        late = self.staging.num_quarantined(self.deadlines.quarantine_s)
        if late > self.staging.num_buffers // 2:
            self.engine.fail(HandoverError(f"{late} staging buffers are stuck in quarantine"))

    async def close(self) -> None:
        """Finish or cancel all background tasks and shut the copier down.

        Calls to peers that do not answer are cancelled after CLOSE_TIMEOUT_S.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.tasks.finish()
        while self.tasks:  # a cancelled task may start another call
            await cancel_and_wait(*self.tasks)
        self.copier.shutdown(wait=False)
