"""Connections that say nothing."""

import asyncio
import socket
from collections import defaultdict

from benchmarks.hostile.kinds.base import Hostile
from benchmarks.hostile.kinds.sockets import has_ended, open_silently, raise_descriptor_limit

NUM_GRPC = 800
"""Silent connections to the gRPC port. grpc turns new clients away from 1,024 on
(cluster/entrypoints/grpc_server.py), whatever those connections do."""
NUM_HTTP = 300
"""Silent connections to the HTTP port, more than twice its bound."""
LOOK_S = 0.2


class SilentConnections(Hostile):
    """Holds connections to both ports open and replaces those that the gateway ends."""

    async def run(self) -> None:
        raise_descriptor_limit()
        held: defaultdict[str, list[socket.socket]] = defaultdict(list)
        wanted = {self.target.grpc: NUM_GRPC, self.target.http: NUM_HTTP}
        try:
            while True:
                for address, num in wanted.items():
                    if address:
                        held[address] = self._fill(address, held[address], num)
                self.is_ready.set()
                await asyncio.sleep(LOOK_S)
        finally:
            for one in (one for sockets in held.values() for one in sockets):
                one.close()

    def _fill(self, address: str, held: list[socket.socket], num: int) -> list[socket.socket]:
        alive = [one for one in held if not has_ended(one)]
        for one in held:
            if one not in alive:
                one.close()
        self.counts["ended"] += len(held) - len(alive)
        return [*alive, *(open_silently(address) for _ in range(num - len(alive)))]
