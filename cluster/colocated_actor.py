"""The colocated rank as a Ray actor."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from core.settings import NodeSettings
from core.shell import Rank, RankShell

if TYPE_CHECKING:
    from cluster.colocated import ColocatedRank


class ColocatedActor(RankShell):
    async def build(self, settings: NodeSettings) -> Rank:
        from cluster.colocated import build

        return await build(settings)

    async def frames(self) -> AsyncIterator[bytes]:
        """One packed TokenFrame per step, as a Ray streaming generator."""
        async for frame in cast("ColocatedRank", self.rank).frames():
            yield frame
