"""A gateway starts with the pairs of ranks that work, and names the pairs that do not."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from benchmarks.harness.engines import greedy
from tandem.cluster.gateway import fleet as fleets
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.cluster.gateway.handles import AttemptRoute
from tandem.core.errors import RankLost
from tandem.core.info import DEGRADED, SERVING
from tandem.text.tokenizer import Tokenizer
from tests.rig import Rig, rig
from tests.waiting import PATIENCE_S, for_ever, until

TWO_DECODES = ("kv.num_pages=100", "decode.replicas=2")


def new_gateway(cluster: Rig) -> ClusterGateway:
    return ClusterGateway(cluster.config, Tokenizer(cluster.config.model.path), cluster.members)


def unreachable(name: str, epoch: int) -> None:
    raise RankLost(f"{name}: no answer from 10.0.0.7:4711")


async def test_one_pair_that_cannot_work_does_not_keep_a_gateway_from_starting(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two decode ranks cannot reach the prefill rank, as in a partial network partition."""
    monkeypatch.setattr(fleets, "WARM_UP_TIMEOUT_S", 10 * PATIENCE_S)
    async with rig(small_model, *TWO_DECODES) as cluster:
        cut = cluster.decodes[1]
        find_control = cut._find_control
        cut._find_control = unreachable  # type: ignore[assignment]
        gateway = new_gateway(cluster)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await gateway.fleet.wait_until_warm()
            assert [d.epoch_name for _, d in gateway.fleet.usable_pairs()] == [
                cluster.decodes[0].spec.epoch_name
            ]
            status = await gateway.status(0)
            assert status.state == DEGRADED
            causes = {rank.name: rank.cause for rank in status.ranks if rank.cause}
            assert list(causes) == [cut.spec.label]
            assert "KV hand-over from prefill-0 failed: " in causes[cut.spec.label]
            assert "10.0.0.7" in causes[cut.spec.label]
            cut._find_control = find_control
            await until(lambda: len(gateway.fleet.usable_pairs()) == 2)
            assert (await gateway.status(0)).state == SERVING
        finally:
            await gateway.fleet.stop()


async def test_a_pair_that_only_waits_holds_a_gateway_up_no_longer_than_its_bound(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full cluster the warm-up of a pair queues after users' requests."""
    monkeypatch.setattr(fleets, "WARM_UP_TIMEOUT_S", 0.1)
    async with rig(small_model, *TWO_DECODES) as cluster:
        slow = cluster.decodes[1].spec.epoch_name
        gateway = new_gateway(cluster)
        warm = gateway.fleet._send_warm_up
        for pair in gateway.fleet._warm_ups.values():
            pair._send_request = waiting_for(slow, warm)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await gateway.fleet.wait_until_warm()
            assert [d.epoch_name for _, d in gateway.fleet.usable_pairs()] == [
                cluster.decodes[0].spec.epoch_name
            ]
            causes = [rank.cause for rank in (await gateway.status(0)).ranks if rank.cause]
            assert causes == ["warming up: no KV hand-over from prefill-0 yet"]
        finally:
            await gateway.fleet.stop()


async def test_a_gateway_without_a_warm_pair_waits_beyond_the_bound(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "WARM_UP_TIMEOUT_S", 0.0)
    async with rig(small_model, "kv.num_pages=100") as cluster:
        gateway = new_gateway(cluster)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await gateway.fleet.wait_until_warm()
            assert len(gateway.fleet.usable_pairs()) == 1
        finally:
            await gateway.fleet.stop()
        tokens, _, _ = await cluster.complete(greedy("a", [5, 6, 7], 4))
        assert tokens


def waiting_for(
    slow: str, warm: Callable[[AttemptRoute], Awaitable[None]]
) -> Callable[[AttemptRoute], Awaitable[None]]:
    async def send(pair: AttemptRoute) -> None:
        await (for_ever() if pair.decode.epoch_name == slow else warm(pair))

    return send
