"""Checks for a user's drafter that a patch added in addition to MTP.

Run it in the patched copy of the tree, with the folder of a checkpoint.
"""

import asyncio
import sys
from pathlib import Path

from benchmarks.harness.engines import greedy
from tests.rig import rig


async def answers(path: Path, *sets: str) -> list[list[int]]:
    """Return the answers of a split cluster, and check that nothing is left behind."""
    async with rig(path, "kv.page_size=8", *sets) as cluster:
        asked = [greedy(f"r{i}", [7, 7, 7 + i], 30, ignore_eos=True) for i in range(3)]
        told = await asyncio.gather(*map(cluster.complete, asked))
        names = {rank.engine._loaded.drafter.name for rank in cluster.decodes}
        assert names == {"again" if sets else "mtp"}
        assert all(one.speculation.num_drafted > 0 for _, _, one in told)
        await cluster.check_empty()
    return [ids for ids, _, _ in told]


async def main() -> None:
    path = Path(sys.argv[1])
    alone = await answers(path)
    assert await answers(path, "speculation.drafter=again") == alone
    assert await answers(path, "speculation.drafter=again", "prefill.dp_size=2") == alone


asyncio.run(main())
