"""The decode node as a Ray actor: a thin shell, bytes in and bytes out.

It imports the rank only in ``start``: whoever creates the actor needs no torch.
"""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import ray

from core.errors import NodeLost
from core.failure import encode_failure
from core.settings import NodeSettings
from core.wire import pack, unpack

if TYPE_CHECKING:
    from decode_node.build import DecodeRank


class RayOwner:
    """The prefill node called ``name`` as the hand-over's control; looked up on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def call(self, method: str, payload: bytes) -> bytes:
        try:
            actor = ray.get_actor(self._name)
            return await actor.call.remote(method, payload)
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            raise NodeLost(f"prefill node {self._name}: {method}: {error}") from error


class DecodeActor:
    """One rank. ``start`` loads the model; until then nothing else may be called."""

    def __init__(self, settings: bytes) -> None:
        self._settings = unpack(NodeSettings, settings)
        self._rank: DecodeRank | None = None

    async def start(self) -> bytes:
        """Packed NodeInfo, or the packed Failure that kept the node from starting."""
        from decode_node.build import build

        try:
            self._rank = await build(self._settings, RayOwner)
            return pack(self._rank.info)
        except Exception as error:
            return encode_failure(error)

    async def call(self, method: str, payload: bytes) -> bytes:
        assert self._rank is not None, "start comes first"
        return await self._rank.node.handle(method, payload)

    async def frames(self) -> AsyncIterator[bytes]:
        """One packed TokenFrame per step, as a Ray streaming generator."""
        assert self._rank is not None, "start comes first"
        async for frame in self._rank.node.frames():
            yield frame

    async def stop(self) -> None:
        if self._rank is not None:
            await self._rank.stop()
