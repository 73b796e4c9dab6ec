"""Ranks as Ray actors, and control calls to a rank's actor."""

import asyncio
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ObjectStoreFullError, OutOfDiskError, RayError

from tandem.core.control import Control
from tandem.core.errors import Overloaded, RankDied, RankLost
from tandem.core.info import COLOCATED, DECODE, PREFILL
from tandem.net.calls import CallClient
from tandem.runtime.rank_actor import RankActor

NAMESPACE = "tandem"


class RayControl(Control):
    """Client of the rank whose process is the actor ``name``, looked up at the first call."""

    def __init__(self, name: str, epoch: int) -> None:
        self._name = name
        self._epoch = epoch
        self._actor: Any = None

    async def call(self, method: str, payload: bytes) -> bytes:
        """Call a method of the rank.

        Raises:
            RankDied: The actor is dead or unknown.
            RankLost: The actor is unreachable, or its call raised.
            Overloaded: Ray has no space for the payload.
        """
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, NAMESPACE)
            return await self._actor.call.remote(self._epoch, method, payload)
        except (ValueError, RayError) as error:
            # One line is enough: the controller logs Ray's whole message once.
            text = f"{self._name}: {method}: {error}".partition("\n")[0]
            if isinstance(error, (ObjectStoreFullError, OutOfDiskError)):
                raise Overloaded(text) from error
            is_dead = isinstance(error, (ActorDiedError, ValueError))
            raise (RankDied if is_dead else RankLost)(text) from error


def owner_control(name: str, epoch: int) -> Control:
    """Return a client with which a decode rank calls the prefill rank ``name``.

    It requests the rank's address through Ray and then calls the rank over TCP.
    """
    return CallClient(name, epoch, RayControl(name, epoch))


class PrefillActor(RankActor):
    builder = "tandem.prefill_node.rank"


class DecodeActor(RankActor):
    builder = "tandem.decode_node.service.rank"
    build_options = MappingProxyType({"find_control": owner_control})


class ColocatedActor(RankActor):
    builder = "tandem.colocated_node.rank"


ACTORS = {PREFILL: PrefillActor, DECODE: DecodeActor, COLOCATED: ColocatedActor}
