"""The prefill node as a Ray actor."""

from core.settings import NodeSettings
from runtime.shell import Rank, RankShell


class PrefillActor(RankShell):
    async def build(self, settings: NodeSettings) -> Rank:
        from prefill_node.build import build

        return await build(settings)
