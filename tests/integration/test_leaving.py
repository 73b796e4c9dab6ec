"""A decode rank that leaves its gang does not wait for a silent prefill rank.

Its gang would otherwise wait for it, and it would lose its weights.
"""

import asyncio
from dataclasses import replace

import pytest

from tandem.core.tasks import cancel_and_wait
from tandem.kv_transfer import endpoint
from tests.integration.handover_peer import DEADLINE_S, DEADLINES, Prefill
from tests.integration.handover_world import offer, world_over
from tests.loopback import LoopbackChannels
from tests.waiting import PATIENCE_S, for_ever, until

PATIENT = replace(DEADLINES, call_s=3600.0)


@pytest.mark.parametrize("silent_at", ["connect", "pull", "send", "release", "close_channel"])
async def test_who_leaves_does_not_wait_for_the_silent(
    silent_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "CLOSE_TIMEOUT_S", 0.1)
    channel_factory = LoopbackChannels(DEADLINE_S)
    prefill = Prefill(channel_factory, lease_s=PATIENCE_S)
    asked = list[str]()

    async def handle(epoch: int, method: str, payload: bytes) -> bytes:
        asked.append(method)
        if method == silent_at:
            await for_ever()
        return await prefill.handle(epoch, method, payload)

    async with world_over(handle, channel_factory, deadlines=PATIENT) as world:
        given = offer(20)
        await world.prefill(given)
        pulling = asyncio.create_task(world.pull(given))
        if silent_at in ("release", "close_channel"):
            await pulling
        else:
            await until(lambda: silent_at in asked)
        await cancel_and_wait(pulling)
        await world.sink.close()
        assert not any(world.sink.counts().values()), world.sink.counts()
    await prefill.source.stop()
    prefill.engine.stop()
