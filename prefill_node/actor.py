"""The prefill node as a Ray actor."""

from core.config import TandemConfig
from core.membership import RankSpec
from runtime.shell import Rank, RankShell


class PrefillActor(RankShell):
    async def build(self, spec: RankSpec, config: TandemConfig) -> Rank:
        from prefill_node.build import build

        return await build(spec, config)
