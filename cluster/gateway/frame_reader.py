"""Heartbeats: keep a decode rank's frames coming and its leases alive, and tell lost ranks.

A rank is lost that does not answer within the bound of its pace, or whose engine is stuck.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from cluster.gateway.handles import Handle
from cluster.gateway.retries import Retries
from core.control import ask
from core.errors import NodeLost
from core.identity import Identity
from core.pace import Pace
from core.request import TokenFrame
from core.schema import unpack
from prefill_node.messages import Load
from runtime.frames import FrameStream, connect

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 5.0
OnLost = Callable[[Handle, BaseException], None]


async def listen(
    handle: Handle, session: int, beat_s: float, stuck_s: float, on_lost: OnLost
) -> None:
    """Hear the rank until cancelled: its frames if it sends some, else how far it is.

    When it is lost, what waits for it fails; it is tried again and again. ``session`` outlives
    connections, ``stuck_s`` is the bound until it has told its own.
    """
    retries = Retries(LONGEST_PAUSE_S)
    try:
        while True:
            try:
                if handle.info.frames is None:
                    await _ask(handle, beat_s, stuck_s, retries)
                else:
                    stream = await connect(handle.name, handle.info.frames, session)
                    await _read(handle, stream, beat_s, stuck_s, retries)
            except Exception as error:
                log.warning("%s is not heard: %s", handle.name, error)
                handle.fail_all(error)
                on_lost(handle, error)
            await retries.pause()
    finally:
        handle.fail_all(NodeLost(f"{handle.name} has left the cluster"))


async def _ask(handle: Handle, beat_s: float, bound_s: float, retries: Retries) -> None:
    while True:
        load = await ask(handle.control, "load", None, Load, bound_s)
        handle.num_other_tokens = max(0, load.num_tokens - handle.num_tokens)
        bound_s = _heard(handle, load.pace, retries)
        await asyncio.sleep(beat_s)


async def _read(
    handle: Handle, stream: FrameStream, beat_s: float, bound_s: float, retries: Retries
) -> None:
    expected: deque[set[Identity]] = deque()
    beats = asyncio.create_task(_beat(handle, stream, beat_s, expected))
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(beat_s + bound_s) as silence:
            async for data in stream.frames():
                frame = unpack(TokenFrame, data)
                handle.deliver(frame, expected.popleft() if frame.beat else set())
                if frame.beat is not None:
                    bound_s = _heard(handle, frame.beat.pace, retries)
                silence.reschedule(now() + beat_s + bound_s)
        raise NodeLost(f"{handle.name} ended its frames")
    except TimeoutError:
        raise NodeLost(f"no sign of life for {bound_s:g} s") from None
    finally:
        beats.cancel()
        stream.close()


def _heard(handle: Handle, pace: Pace, retries: Retries) -> float:
    """The rank answers; raises NodeLost if its engine does not go on. How long it may be silent."""
    if pace.is_stuck:
        raise NodeLost(f"its engine is {pace}")
    handle.is_heard.set()
    retries.progressed()
    return pace.bound_s


async def _beat(
    handle: Handle, stream: FrameStream, beat_s: float, expected: deque[set[Identity]]
) -> None:
    """What was granted before a beat was sent has to be alive in its answer."""
    while True:
        expected.append(set(handle.granted))
        stream.beat()
        await asyncio.sleep(beat_s)
