"""The decode node as a Ray actor."""

from typing import Any

import ray

from core.config import TandemConfig
from core.errors import NodeLost
from core.membership import RankSpec
from runtime.shell import StreamingRank, StreamingShell


class RayOwner:
    """The prefill node called ``name`` as the hand-over's control."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = None

    async def call(self, method: str, payload: bytes) -> bytes:
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name)
            return await self._actor.call.remote(method, payload)
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            self._actor = None
            raise NodeLost(f"prefill node {self._name}: {method}: {error}") from error


class DecodeActor(StreamingShell):
    async def build(self, spec: RankSpec, config: TandemConfig) -> StreamingRank:
        from decode_node.build import build

        return await build(spec, config, RayOwner)
