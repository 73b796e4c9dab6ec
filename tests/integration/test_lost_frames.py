"""The connection that a decode node's frames come over breaks; the node itself is well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.gateway.gateway import ClusterGateway
from cluster.gateway.nodes import Frames
from core.config import TINY_MODEL
from core.errors import NodeLost
from runtime.frames import FrameServer, connect
from tests.engines import greedy
from tests.exact import near_ties
from tests.integration.test_lost_prefill import prompts
from tests.rig import Rig, rig


@asynccontextmanager
async def over_a_socket(cluster: Rig) -> AsyncIterator[FrameServer]:
    """The cluster's gateway again, its only decode node's frames read over a real socket."""
    [handle], [decode] = cluster.gateway._decodes.values(), cluster.decodes
    server = FrameServer("127.0.0.1", decode.node.subscribe)
    address = await server.listen()

    async def reopen() -> Frames:
        return (await connect(handle.info.name, address)).frames

    await cluster.gateway.stop()
    handle.frames, handle.reopen = await reopen(), reopen
    prefills = list(cluster.gateway._prefills.values())
    tokenizer = cluster.gateway.tokenizer
    cluster.gateway = ClusterGateway(cluster.config, tokenizer, prefills, [handle])
    try:
        yield server
    finally:
        await cluster.gateway.stop()
        await server.stop()


async def test_answers_go_on_exactly_once_the_frames_are_read_again() -> None:
    async with (
        rig(TINY_MODEL, "kv.num_pages=300", "kv.page_size=16") as cluster,
        over_a_socket(cluster) as server,
    ):
        asked = [greedy(f"r{i}", ids, 60, ignore_eos=True) for i, ids in enumerate(prompts(4, 9))]
        for _ in range(2):
            cut_at = cluster.decodes[0].engine.num_steps + 8
            running = [asyncio.create_task(cluster.complete(request)) for request in asked]
            async with asyncio.timeout(30):
                while cluster.decodes[0].engine.num_steps < cut_at:
                    await asyncio.sleep(0.001)
            for connection in server._connections:
                connection.cancel()
            for request, (ids, _, _) in zip(asked, await asyncio.gather(*running), strict=True):
                assert len(ids) == 60
                assert not near_ties(TINY_MODEL, list(request.prompt_ids), ids)
        assert cluster.gateway.is_healthy() and len(server._connections) == 1
        await cluster.check_empty()


async def test_a_node_whose_engine_stopped_is_not_read_again() -> None:
    async with (
        rig(TINY_MODEL, "kv.num_pages=300", "kv.page_size=16") as cluster,
        over_a_socket(cluster),
    ):

        def step() -> None:
            raise RuntimeError("cosmic ray")

        cluster.decodes[0].engine.step = step  # type: ignore[method-assign]
        with pytest.raises(NodeLost):
            await cluster.complete(greedy("r", prompts(1, 9)[0], 8))
        await asyncio.sleep(0.5)
        assert not cluster.gateway.is_healthy()
