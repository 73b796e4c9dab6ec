"""The colocated rank as a Ray actor."""

from core.config import TandemConfig
from core.membership import RankSpec
from runtime.shell import StreamingRank, StreamingShell


class ColocatedActor(StreamingShell):
    async def build(self, spec: RankSpec, config: TandemConfig) -> StreamingRank:
        from cluster.control.colocated import build

        return await build(spec, config)
