"""Heartbeats of ranks, and token frames of decode ranks. Heartbeats also renew leases.

A rank is lost if it does not answer within its stall threshold, or if its engine is stalled.
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
"""Minimum seconds between two heartbeats, regardless of the number of pending GetStatus calls."""
OnLost = Callable[[RankHandle, Exception], None]


async def follow_rank(
    rank: RankHandle, session: int, heartbeat_s: float, stall_timeout_s: float, on_lost: OnLost
) -> None:
    """Send heartbeats to a rank and receive its frames until cancelled.

    Reconnects after every loss.

    Args:
        rank: Rank to follow. Ranks without frames are polled by calls instead.
        session: Nonce of this gateway's session, which outlives connections.
        heartbeat_s: Seconds between heartbeats.
        stall_timeout_s: Seconds without an answer after which the rank is lost, until its first
            heartbeat reports a threshold of its own.
        on_lost: Called when the rank is newly lost.
    """
    retries = Retries(MAX_RECONNECT_PAUSE_S)
    try:
        while True:
            rank.pending_heartbeats.clear()
            try:
                if rank.info.frames is not None:
                    stream = await connect(rank.epoch_name, rank.info.frames, session)
                    await _read_frames(
                        rank=rank,
                        stream=stream,
                        heartbeat_s=heartbeat_s,
                        stall_threshold_s=stall_timeout_s,
                        retries=retries,
                    )
                else:
                    await _poll_heartbeats(
                        rank=rank,
                        heartbeat_s=heartbeat_s,
                        stall_threshold_s=stall_timeout_s,
                        retries=retries,
                    )
            except Exception as error:
                log.warning(
                    "%s: waiting for heartbeats and tokens failed: %s", rank.epoch_name, error
                )
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
            await call_rank(
                control=rank.control,
                method="heartbeat",
                message=None,
                reply=Heartbeat,
                timeout_s=stall_threshold_s,
            )
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
        raise RankLost(f"{rank.epoch_name} closed its stream of tokens")
    except TimeoutError:
        raise RankLost(f"{rank.epoch_name} sent no heartbeat for {stall_threshold_s:g} s") from None
    finally:
        heartbeats.cancel()
        stream.close()


async def _send_heartbeats(rank: RankHandle, stream: FrameStream, heartbeat_s: float) -> None:
    """Send heartbeats until cancelled.

    The answer to a heartbeat must list all sequences that were granted before it was sent.
    """
    while True:
        rank.on_heartbeat_sent()
        stream.send_heartbeat()
        await _wait_until_due(rank, heartbeat_s)


async def _wait_until_due(rank: RankHandle, heartbeat_s: float) -> None:
    """Wait until the next heartbeat is due.

    This is after ``heartbeat_s`` seconds, or earlier if a GetStatus call needs a heartbeat.
    """
    await asyncio.sleep(min(heartbeat_s, MIN_HEARTBEAT_PERIOD_S))
    with suppress(TimeoutError):
        async with asyncio.timeout(heartbeat_s - MIN_HEARTBEAT_PERIOD_S):
            await rank.heartbeat_requested.wait()
