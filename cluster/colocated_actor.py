"""The colocated rank as a Ray actor: a thin shell, bytes in and bytes out."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from core.failure import encode_failure
from core.settings import NodeSettings
from core.wire import pack, unpack

if TYPE_CHECKING:
    from cluster.colocated import ColocatedRank


class ColocatedActor:
    """The Ray actor of a colocated rank."""

    def __init__(self, settings: bytes) -> None:
        self._settings = unpack(NodeSettings, settings)
        self._rank: ColocatedRank | None = None

    async def start(self) -> bytes:
        """Packed NodeInfo, or the packed Failure that kept the node from starting."""
        from cluster.colocated import build

        try:
            self._rank = await build(self._settings)
            return pack(self._rank.info)
        except Exception as error:
            return encode_failure(error)

    async def call(self, method: str, payload: bytes) -> bytes:
        assert self._rank is not None, "start comes first"
        return await self._rank.handle(method, payload)

    async def frames(self) -> AsyncIterator[bytes]:
        assert self._rank is not None, "start comes first"
        async for frame in self._rank.decode.node.frames():
            yield frame

    async def stop(self) -> None:
        if self._rank is not None:
            await self._rank.stop()
