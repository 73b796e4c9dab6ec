"""Staging buffers, the only memory that channels access."""

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import HandoverError


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Staging memory for one chunk; ``bytes`` is a uint8 tensor ``[chunk_bytes]``."""

    index: int
    bytes: Tensor


class StagingPool:
    """A pool of ``total_bytes // chunk_bytes`` buffers, reserved first come, first served.

    The buffer freed last is reused first. Buffers that are never needed therefore take no physical
    CPU memory. Owned by one asyncio loop. Channels end a quarantine from other threads, through
    that loop.
    """

    def __init__(self, total_bytes: int, chunk_bytes: int, pin: bool = False, device: str = "cpu"):
        if not 0 < chunk_bytes <= total_bytes:
            raise ValueError(
                f"kv_transfer.staging_bytes={total_bytes}: use at least chunk_bytes={chunk_bytes}"
            )
        self.chunk_bytes = chunk_bytes
        self.num_buffers = total_bytes // chunk_bytes
        shape = (self.num_buffers, chunk_bytes)
        storage = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pin)
        self._free = [Buffer(i, storage[i]) for i in range(self.num_buffers)]
        self._reserved: set[int] = set()
        self._quarantined: dict[int, float] = {}
        """``time.monotonic()`` of the start of each quarantine, by buffer index."""
        self._credits = asyncio.Semaphore(self.num_buffers)

    @property
    def num_taken(self) -> int:
        """Number of buffers that are reserved or in quarantine."""
        return self.num_buffers - len(self._free)

    def num_quarantined(self, for_s: float = 0.0) -> int:
        """Return the number of buffers in quarantine for at least ``for_s`` seconds."""
        return sum(at <= time.monotonic() - for_s for at in self._quarantined.values())

    async def reserve(self, timeout_s: float | None = None) -> Buffer:
        """Wait for a free buffer. Calls are served in order. A cancelled wait loses no buffer.

        Raises HandoverError after ``timeout_s`` seconds; None waits indefinitely.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._credits.acquire()
        except TimeoutError:
            raise HandoverError(f"no staging buffer became free within {timeout_s} s") from None
        buffer = self._free.pop()
        self._reserved.add(buffer.index)
        return buffer

    def free(self, buffer: Buffer) -> None:
        assert buffer.index in self._reserved, f"staging buffer {buffer.index} was freed twice"
        self._reserved.remove(buffer.index)
        self._readmit(buffer)

    def quarantine(self, buffer: Buffer, terminal: "Future[None]") -> None:
        """Free a reserved buffer once ``terminal`` of its channel resolves."""
        assert buffer.index in self._reserved, f"staging buffer {buffer.index} is not reserved"
        self._reserved.remove(buffer.index)
        self._quarantined[buffer.index] = time.monotonic()
        loop = asyncio.get_running_loop()

        def end() -> None:
            del self._quarantined[buffer.index]
            self._readmit(buffer)

        terminal.add_done_callback(lambda _: loop.call_soon_threadsafe(end))

    def check_integrity(self) -> None:
        """Assert that every buffer is exactly one of free, reserved and in quarantine."""
        free = [buffer.index for buffer in self._free]
        everything = sorted([*free, *self._reserved, *self._quarantined])
        assert everything == list(range(self.num_buffers)), (
            f"buffers were lost or counted twice: {everything}"
        )

    def _readmit(self, buffer: Buffer) -> None:
        self._free.append(buffer)
        self._credits.release()
