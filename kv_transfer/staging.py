"""Staging buffers, the only memory the wire touches."""

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import HandoverError


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One chunk's staging: ``bytes`` is uint8 ``[chunk_bytes]``."""

    index: int
    bytes: Tensor


class StagingPool:
    """``total_bytes // chunk_bytes`` buffers, handed out first come, first served. The one freed
    last goes first: of a CPU's memory, what is never used is never taken.

    Owned by the asyncio loop that calls it; only `quarantine`'s end comes from elsewhere.
    """

    def __init__(self, total_bytes: int, chunk_bytes: int, pin: bool = False, device: str = "cpu"):
        if not 0 < chunk_bytes <= total_bytes:
            raise ValueError(
                f"kv_transfer.staging_bytes must hold a chunk of {chunk_bytes}, got {total_bytes}"
            )
        self.chunk_bytes = chunk_bytes
        self.num_buffers = total_bytes // chunk_bytes
        shape = (self.num_buffers, chunk_bytes)
        storage = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pin)
        self._free = [Buffer(i, storage[i]) for i in range(self.num_buffers)]
        self._reserved: set[int] = set()
        self._quarantined: dict[int, float] = {}
        """Since when."""
        self._credits = asyncio.Semaphore(self.num_buffers)

    @property
    def num_taken(self) -> int:
        """Buffers that are reserved or quarantined."""
        return self.num_buffers - len(self._free)

    def num_quarantined(self, for_s: float = 0.0) -> int:
        """Buffers that have been in quarantine for so long."""
        return sum(at <= time.monotonic() - for_s for at in self._quarantined.values())

    async def reserve(self, timeout_s: float | None = None) -> Buffer:
        """Wait for a buffer, in order of asking. Cancelling the wait loses no buffer.

        Raises HandoverError after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._credits.acquire()
        except TimeoutError:
            raise HandoverError(f"no staging buffer came free within {timeout_s} s") from None
        buffer = self._free.pop()
        self._reserved.add(buffer.index)
        return buffer

    def free(self, buffer: Buffer) -> None:
        assert buffer.index in self._reserved, f"staging buffer {buffer.index} was freed twice"
        self._reserved.remove(buffer.index)
        self._readmit(buffer)

    def quarantine(self, buffer: Buffer, terminal: "Future[None]") -> None:
        """Free a buffer only once its channel can touch it no more."""
        assert buffer.index in self._reserved, f"staging buffer {buffer.index} is not held"
        self._reserved.remove(buffer.index)
        self._quarantined[buffer.index] = time.monotonic()
        loop = asyncio.get_running_loop()

        def end() -> None:
            del self._quarantined[buffer.index]
            self._readmit(buffer)

        terminal.add_done_callback(lambda _: loop.call_soon_threadsafe(end))

    def check_integrity(self) -> None:
        """Assert that every buffer is free, held or quarantined, and exactly one of these."""
        free = [buffer.index for buffer in self._free]
        everything = sorted([*free, *self._reserved, *self._quarantined])
        assert everything == list(range(self.num_buffers)), f"staging adds up to {everything}"

    def _readmit(self, buffer: Buffer) -> None:
        self._free.append(buffer)
        self._credits.release()
