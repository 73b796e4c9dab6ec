"""Which nodes are lost to a gateway, and the probes that find them again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.gateway.nodes import DecodeHandle, PrefillHandle
from core.info import NodeStatus
from core.schema import decode

log = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Outages:
    """Names of nodes that get no requests. Owned by one asyncio loop.

    A handle means one life of a node: what answers a probe is that life, with all it held.
    ``recover`` is called with the name of a node that answers again, and may raise NodeLost.
    """

    def __init__(self, recover: Callable[[str], Awaitable[None]]) -> None:
        self.names: set[str] = set()
        self._recover = recover
        self._probes: dict[str, asyncio.Task[None]] = {}

    def add(self, handle: PrefillHandle | DecodeHandle, error: BaseException) -> None:
        """The node was found lost: leave it out until it answers, and ask it from now on."""
        name = handle.info.name
        if name in self.names:
            return
        log.warning("%s is lost and gets no requests until it answers: %s", name, error)
        self.names.add(name)
        self._probes[name] = asyncio.create_task(self._probe(handle), name=f"probe-{name}")

    async def stop(self) -> None:
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    async def _probe(self, handle: PrefillHandle | DecodeHandle) -> None:
        name, pause_s = handle.info.name, FIRST_PAUSE_S
        while not await self._is_back(handle):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        log.warning("%s answers again and gets requests", name)
        del self._probes[name]
        self.names.discard(name)

    async def _is_back(self, handle: PrefillHandle | DecodeHandle) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                decode(NodeStatus, await handle.control.call("status", b""))
                await self._recover(handle.info.name)
        except Exception as error:
            log.debug("%s does not answer: %r", handle.info.name, error)
            return False
        return True
