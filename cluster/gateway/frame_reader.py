"""Heartbeats: keep a rank's beats coming, a decode rank's frames and leases with them.

A rank is lost that does not answer within the bound of its pace, or whose engine is stuck.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from tandem.cluster.gateway.handles import Handle
from tandem.cluster.gateway.retries import Retries
from tandem.core.beat import Beat
from tandem.core.control import ask
from tandem.core.errors import RankLost
from tandem.core.request import TokenFrame
from tandem.core.schema import unpack
from tandem.runtime.frames import FrameStream, connect

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 5.0
MIN_BEAT_S = 0.1
"""Minimum time between two heartbeats, however many calls of GetStatus wait for one."""
OnLost = Callable[[Handle, Exception], None]


async def listen(
    rank: Handle, session: int, beat_s: float, stuck_s: float, on_lost: OnLost
) -> None:
    """Hear the rank until cancelled: its frames if it sends some, else what it answers.

    When it is lost, it is tried again and again. ``session`` outlives connections, ``stuck_s`` is
    the bound until it has told its own.
    """
    retries = Retries(LONGEST_PAUSE_S)
    try:
        while True:
            rank.under_way.clear()
            try:
                if rank.info.frames is not None:
                    stream = await connect(rank.life, rank.info.frames, session)
                    await _read(rank, stream, beat_s, stuck_s, retries)
                else:
                    await _ask(rank, beat_s, stuck_s, retries)
            except Exception as error:
                log.warning("%s is not heard: %s", rank.life, error)
                if rank.liveness.end(error):
                    on_lost(rank, error)
            await retries.pause()
    finally:
        rank.liveness.end(RankLost(f"{rank.life} has left the cluster"))


async def _ask(rank: Handle, beat_s: float, bound_s: float, retries: Retries) -> None:
    while True:
        rank.beat_sent()
        bound_s = rank.heard(await ask(rank.control, "beat", None, Beat, bound_s))
        retries.progressed()
        await _due(rank, beat_s)


async def _read(
    rank: Handle, stream: FrameStream, beat_s: float, bound_s: float, retries: Retries
) -> None:
    beats = asyncio.create_task(_beat(rank, stream, beat_s))
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(beat_s + bound_s) as silence:
            async for data in stream.frames():
                frame = unpack(TokenFrame, data)
                rank.inboxes.put(frame.updates)
                if frame.beat is not None:
                    bound_s = rank.heard(frame.beat)
                    retries.progressed()
                silence.reschedule(now() + beat_s + bound_s)
        raise RankLost(f"{rank.life} ended its frames")
    except TimeoutError:
        raise RankLost(f"no sign of life for {bound_s:g} s") from None
    finally:
        beats.cancel()
        stream.close()


async def _beat(rank: Handle, stream: FrameStream, beat_s: float) -> None:
    """What was granted before a beat was sent has to be alive in its answer."""
    while True:
        rank.beat_sent()
        stream.beat()
        await _due(rank, beat_s)


async def _due(rank: Handle, beat_s: float) -> None:
    """Wait until the next heartbeat is due: after ``beat_s``, or earlier if a status wants it."""
    await asyncio.sleep(min(beat_s, MIN_BEAT_S))
    with suppress(TimeoutError):
        async with asyncio.timeout(beat_s - MIN_BEAT_S):
            await rank.beat_wanted.wait()
