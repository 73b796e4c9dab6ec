"""Keeps the frames of one decode rank coming, and the rank's leases alive by heartbeats."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from cluster.gateway.handles import Handle
from cluster.gateway.retries import Retries
from core.errors import NodeLost
from core.identity import Identity
from core.request import TokenFrame
from core.schema import unpack
from runtime.frames import FrameStream, connect

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 5.0


async def read_frames(
    handle: Handle,
    session: int,
    beat_s: float,
    on_lost: Callable[[Handle, BaseException], None],
) -> None:
    """Read until cancelled; a stream that breaks fails what waits for it and is opened again.

    ``session`` outlives connections.
    """
    retries = Retries(LONGEST_PAUSE_S)
    assert handle.info.frames is not None, f"{handle.name} serves no frames"
    try:
        while True:
            try:
                stream = await connect(handle.name, handle.info.frames, session)
                handle.is_heard.set()
                retries.progressed()
                await _read(handle, stream, beat_s)
            except Exception as error:
                log.warning("frames of %s broke: %s", handle.name, error)
                handle.is_heard.clear()
                handle.fail_all(str(error))
                on_lost(handle, error)
            await retries.pause()
    finally:
        handle.fail_all("it has left the cluster")


async def _read(handle: Handle, stream: FrameStream, beat_s: float) -> None:
    expected: deque[set[Identity]] = deque()
    beats = asyncio.create_task(_beat(handle, stream, beat_s, expected))
    try:
        async for data in stream.frames():
            frame = unpack(TokenFrame, data)
            handle.deliver(frame, expected.popleft() if frame.beat else set())
        raise NodeLost(f"{handle.name} ended its frames")
    finally:
        beats.cancel()
        stream.close()


async def _beat(
    handle: Handle, stream: FrameStream, beat_s: float, expected: deque[set[Identity]]
) -> None:
    """What was granted before a beat was sent has to be alive in its answer."""
    while True:
        expected.append(set(handle.granted))
        stream.beat()
        await asyncio.sleep(beat_s)
