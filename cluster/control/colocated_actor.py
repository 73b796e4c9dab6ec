"""The colocated rank as a Ray actor."""

from core.settings import NodeSettings
from runtime.shell import StreamingRank, StreamingShell


class ColocatedActor(StreamingShell):
    async def build(self, settings: NodeSettings) -> StreamingRank:
        from cluster.control.colocated import build

        return await build(settings)
