"""Keeps the frames of one decode rank coming, and the rank's leases alive by heartbeats."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from cluster.gateway.handles import DecodeHandle
from core.errors import NodeLost
from core.identity import Identity
from core.request import TokenFrame
from core.schema import unpack
from runtime.frames import FrameStream, connect

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class FrameReader:
    """Reads until ``stop``; a stream that breaks fails what waits for it and is opened again.

    ``opened`` is set while frames come. ``session`` outlives connections.
    """

    def __init__(
        self,
        handle: DecodeHandle,
        session: int,
        beat_s: float,
        on_lost: Callable[[DecodeHandle, BaseException], None],
    ) -> None:
        self._handle = handle
        self._session = session
        self._beat_s = beat_s
        self._on_lost = on_lost
        self.opened = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"frames-{handle.name}")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._handle.fail_all("it has left the cluster")

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                address = self._handle.info.frames
                assert address is not None, f"{self._handle.name} serves no frames"
                stream = await connect(self._handle.name, address, self._session)
                self.opened.set()
                pause_s = FIRST_PAUSE_S
                await self._read(stream)
            except Exception as error:
                log.warning("frames of %s broke: %s", self._handle.name, error)
                self.opened.clear()
                self._handle.fail_all(str(error))
                self._on_lost(self._handle, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _read(self, stream: FrameStream) -> None:
        expected: deque[set[Identity]] = deque()
        beats = asyncio.create_task(self._beat(stream, expected))
        try:
            async for data in stream.frames():
                frame = unpack(TokenFrame, data)
                self._handle.deliver(frame, expected.popleft() if frame.beat else set())
            raise NodeLost(f"{self._handle.name} ended its frames")
        finally:
            beats.cancel()
            stream.close()

    async def _beat(self, stream: FrameStream, expected: deque[set[Identity]]) -> None:
        """What was granted before a beat was sent has to be alive in its answer."""
        while True:
            expected.append(set(self._handle.granted))
            stream.beat()
            await asyncio.sleep(self._beat_s)
