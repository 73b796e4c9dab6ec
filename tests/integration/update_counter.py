"""Checks for a counter that a patch added to the decode engine.

Run it in the patched copy of the tree, with the folder of a checkpoint.
"""

import asyncio
import sys
from pathlib import Path

from tandem import AsyncClient
from tandem.cluster.entrypoints.server import Server
from tests.rig import rig

NAME = "num_updates"


async def main(path: Path) -> None:
    async with (
        rig(path, "server.address=127.0.0.1:0") as cluster,
        Server(cluster.config) as server,
        AsyncClient(server.address, retry_s=0) as client,
    ):
        await server.attach(cluster.gateway)
        answer = await client.complete([5, 6, 7], max_tokens=20, max_drafts=0, ignore_eos=True)
        ranks = {rank.kind: rank.counters for rank in (await client.status()).ranks}
        assert ranks["decode"][NAME] >= len(answer.token_ids) - 1, ranks
        assert ranks["decode"]["num_steps"] >= ranks["decode"][NAME], ranks
        assert NAME not in ranks["prefill"] and ranks["prefill"]["num_steps"] > 0, ranks
        await cluster.check_empty()


asyncio.run(main(Path(sys.argv[1])))
