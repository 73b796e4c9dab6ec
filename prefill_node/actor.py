"""The prefill node as a Ray actor: a thin shell, bytes in and bytes out.

It imports the rank only in ``start``: whoever creates the actor needs no torch.
"""

from typing import TYPE_CHECKING

from core.failure import encode_failure
from core.settings import NodeSettings
from core.wire import pack, unpack

if TYPE_CHECKING:
    from prefill_node.build import PrefillRank


class PrefillActor:
    """One rank. ``start`` loads the model; until then nothing else may be called."""

    def __init__(self, settings: bytes) -> None:
        self._settings = unpack(NodeSettings, settings)
        self._rank: PrefillRank | None = None

    async def start(self) -> bytes:
        """Packed NodeInfo, or the packed Failure that kept the node from starting."""
        from prefill_node.build import build

        try:
            self._rank = await build(self._settings)
            return pack(self._rank.info)
        except Exception as error:
            return encode_failure(error)

    async def call(self, method: str, payload: bytes) -> bytes:
        assert self._rank is not None, "start comes first"
        return await self._rank.node.handle(method, payload)

    async def stop(self) -> None:
        if self._rank is not None:
            await self._rank.stop()
