"""A node found lost is left out until it answers, and asked less and less often."""

import asyncio
from types import SimpleNamespace

import pytest

from cluster.gateway import outages
from cluster.gateway.outages import Outages
from core.errors import NodeLost
from core.info import NodeStatus
from core.schema import encode_failure, pack

ERROR = NodeLost("gone")


class Node:
    """Stands for a handle; answers ``status`` from the given probe on."""

    def __init__(self, answers_from: int) -> None:
        self.info = SimpleNamespace(name="prefill-0")
        self.control = self
        self.probed_at: list[float] = []
        self._answers_from = answers_from

    async def call(self, method: str, payload: bytes) -> bytes:
        assert method == "status"
        self.probed_at.append(asyncio.get_running_loop().time())
        num = len(self.probed_at)
        if num >= self._answers_from:
            return pack(NodeStatus("prefill-0", "prefill", 1, 0, 0, 0, 0, 0, 0))
        if num == 1:
            return encode_failure(NodeLost("engine loop has ended"))
        raise NodeLost("dead")


async def nothing(name: str) -> None:
    return


async def until_back(found: Outages) -> None:
    async with asyncio.timeout(10):
        while found.names:
            await asyncio.sleep(0.001)


async def test_a_node_that_answers_gets_requests_again() -> None:
    found, node = Outages(nothing), Node(answers_from=1)
    found.add(node, ERROR)
    assert found.names == {"prefill-0"}
    await until_back(found)
    assert len(node.probed_at) == 1
    await found.stop()


async def test_pauses_between_probes_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(outages, "LONGEST_PAUSE_S", 0.08)
    found, node = Outages(nothing), Node(answers_from=6)
    found.add(node, ERROR)
    found.add(node, ERROR)
    await until_back(found)
    assert len(node.probed_at) == 6, "one probe at a time, whoever finds the node lost"
    gaps = [b - a for a, b in zip(node.probed_at, node.probed_at[1:], strict=False)]
    for gap, pause in zip(gaps, (0.02, 0.04, 0.08, 0.08, 0.08), strict=True):
        assert gap >= pause
    await found.stop()


async def test_a_node_that_cannot_be_recovered_stays_out() -> None:
    tries: list[str] = []

    async def recover(name: str) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise ERROR

    found, node = Outages(recover), Node(answers_from=1)
    found.add(node, ERROR)
    await until_back(found)
    assert tries == ["prefill-0"] * 3 and len(node.probed_at) == 3
    await found.stop()
