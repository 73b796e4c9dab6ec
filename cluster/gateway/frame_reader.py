"""Heartbeats: keep a rank's beats coming, a decode rank's frames and leases with them.

A rank is lost that does not answer within the bound of its pace, or whose engine is stuck.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from tandem.cluster.gateway.handles import RankHandle
from tandem.cluster.gateway.retries import Retries
from tandem.core.control import call_rank
from tandem.core.errors import RankLost
from tandem.core.heartbeat import Heartbeat
from tandem.core.request import TokenFrame
from tandem.core.schema import unpack
from tandem.runtime.frames import FrameStream, connect

log = logging.getLogger(__name__)
MAX_RECONNECT_PAUSE_S = 5.0
MIN_HEARTBEAT_PERIOD_S = 0.1
"""Minimum time between two heartbeats, however many calls of GetStatus wait for one."""
OnLost = Callable[[RankHandle, Exception], None]


async def follow_rank(
    rank: RankHandle, session: int, heartbeat_s: float, stall_timeout_s: float, on_lost: OnLost
) -> None:
    """Hear the rank until cancelled: its frames if it sends some, else what it answers.

    When it is lost, it is tried again and again. ``session`` outlives connections,
    ``stall_timeout_s`` is the bound until it has told its own.
    """
    retries = Retries(MAX_RECONNECT_PAUSE_S)
    try:
        while True:
            rank.pending_heartbeats.clear()
            try:
                if rank.info.frames is not None:
                    stream = await connect(rank.epoch_name, rank.info.frames, session)
                    await _read_frames(rank, stream, heartbeat_s, stall_timeout_s, retries)
                else:
                    await _poll_heartbeats(rank, heartbeat_s, stall_timeout_s, retries)
            except Exception as error:
                log.warning("%s is not heard: %s", rank.epoch_name, error)
                if rank.liveness.mark_lost(error):
                    on_lost(rank, error)
            await retries.pause()
    finally:
        rank.liveness.mark_lost(RankLost(f"{rank.epoch_name} has left the cluster"))


async def _poll_heartbeats(
    rank: RankHandle, heartbeat_s: float, stall_threshold_s: float, retries: Retries
) -> None:
    while True:
        rank.on_heartbeat_sent()
        stall_threshold_s = rank.on_heartbeat(
            await call_rank(rank.control, "heartbeat", None, Heartbeat, stall_threshold_s)
        )
        retries.reset()
        await _wait_until_due(rank, heartbeat_s)


async def _read_frames(
    rank: RankHandle,
    stream: FrameStream,
    heartbeat_s: float,
    stall_threshold_s: float,
    retries: Retries,
) -> None:
    heartbeats = asyncio.create_task(_send_heartbeats(rank, stream, heartbeat_s))
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(heartbeat_s + stall_threshold_s) as silence:
            async for data in stream.frames():
                frame = unpack(TokenFrame, data)
                rank.inboxes.deliver(frame.updates)
                if frame.heartbeat is not None:
                    stall_threshold_s = rank.on_heartbeat(frame.heartbeat)
                    retries.reset()
                silence.reschedule(now() + heartbeat_s + stall_threshold_s)
        raise RankLost(f"{rank.epoch_name} ended its frames")
    except TimeoutError:
        raise RankLost(f"no sign of life for {stall_threshold_s:g} s") from None
    finally:
        heartbeats.cancel()
        stream.close()


async def _send_heartbeats(rank: RankHandle, stream: FrameStream, heartbeat_s: float) -> None:
    """What was granted before a beat was sent has to be alive in its answer."""
    while True:
        rank.on_heartbeat_sent()
        stream.send_heartbeat()
        await _wait_until_due(rank, heartbeat_s)


async def _wait_until_due(rank: RankHandle, heartbeat_s: float) -> None:
    """Wait until the next heartbeat is due: after ``heartbeat_s``, or earlier if a status wants
    it."""
    await asyncio.sleep(min(heartbeat_s, MIN_HEARTBEAT_PERIOD_S))
    with suppress(TimeoutError):
        async with asyncio.timeout(heartbeat_s - MIN_HEARTBEAT_PERIOD_S):
            await rank.heartbeat_requested.wait()
