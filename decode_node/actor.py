"""The decode node as a Ray actor."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

import ray

from core.errors import NodeLost
from core.settings import NodeSettings
from core.shell import Rank, RankShell

if TYPE_CHECKING:
    from decode_node.build import DecodeRank


class RayOwner:
    """The prefill node called ``name`` as the hand-over's control."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def call(self, method: str, payload: bytes) -> bytes:
        try:
            actor = ray.get_actor(self._name)
            return await actor.call.remote(method, payload)
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            raise NodeLost(f"prefill node {self._name}: {method}: {error}") from error


class DecodeActor(RankShell):
    async def build(self, settings: NodeSettings) -> Rank:
        from decode_node.build import build

        return await build(settings, RayOwner)

    async def frames(self) -> AsyncIterator[bytes]:
        """One packed TokenFrame per step, as a Ray streaming generator."""
        async for frame in cast("DecodeRank", self.rank).frames():
            yield frame
