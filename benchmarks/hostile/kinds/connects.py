"""A flood of connections."""

import asyncio
import socket
from collections import deque
from itertools import cycle

from benchmarks.hostile.kinds.base import Hostile
from benchmarks.hostile.kinds.sockets import open_silently, raise_descriptor_limit

PER_S = 1000
TICK_S = 0.05
MAX_OPEN = 600
"""Connections that are open at a time; the oldest are closed."""


class Connects(Hostile):
    """Opens 1,000 connections a second to the ports of a gateway in turns and sends nothing."""

    async def run(self) -> None:
        raise_descriptor_limit()
        addresses = cycle(filter(None, (self.target.grpc, self.target.http)))
        held = deque[socket.socket]()
        now = asyncio.get_running_loop().time
        began = now()
        try:
            while True:
                while self.counts["opened"] < PER_S * (now() - began):
                    held.append(open_silently(next(addresses)))
                    self.counts["opened"] += 1
                    if len(held) > MAX_OPEN:
                        held.popleft().close()
                if len(held) >= MAX_OPEN:
                    self.is_ready.set()
                await asyncio.sleep(TICK_S)
        finally:
            for one in held:
                one.close()
