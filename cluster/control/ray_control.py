"""Control calls over Ray: bytes in, bytes out; a dead actor becomes a named error."""

from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from cluster.gateway.nodes import Frames
from core.errors import NodeLost
from core.schema import decode
from runtime.frames import FrameAddress, connect


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


async def open_frames(name: str, actor: Any) -> Frames:
    """The frames of a decode actor, subscribed to. Raises NodeLost or ValueError."""
    try:
        address = await actor.frame_address.remote()
    except (RayActorError, RayTaskError) as error:
        raise NodeLost(f"{name}: frame_address: {error}") from error
    return (await connect(name, decode(FrameAddress, address))).frames
