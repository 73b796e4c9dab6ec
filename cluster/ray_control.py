"""Control calls over Ray: bytes in, bytes out; a dead actor becomes a named error."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from core.errors import NodeLost


class RayControl:
    """``call`` awaits one method of a node's actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    async def call(self, method: str, payload: bytes) -> bytes:
        """Raises NodeLost when the actor is dead or raised instead of answering."""
        try:
            return await self._actor.call.remote(method, payload)
        except (RayActorError, RayTaskError) as error:
            raise NodeLost(f"{self._name}: {method}: {error}") from error


def frames_of(name: str, actor: Any) -> Callable[[], AsyncIterator[bytes]]:
    """A decode actor's frames as an async iterator of packed TokenFrames."""

    async def frames() -> AsyncIterator[bytes]:
        try:
            async for reference in actor.frames.options(num_returns="streaming").remote():
                yield await reference
        except (RayActorError, RayTaskError) as error:
            raise NodeLost(f"{name}: frames: {error}") from error

    return frames
