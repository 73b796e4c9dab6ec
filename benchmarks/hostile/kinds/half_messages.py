"""Calls whose message is never complete."""

import asyncio
from contextlib import suppress

from benchmarks.harness.http2 import Connection, connection
from benchmarks.hostile.kinds.base import GENERATE, Hostile

NUM_CONNECTIONS = 4
NUM_CALLS = 50
"""Open calls of each connection."""
HALF = b"\0" + (1_000_000).to_bytes(4, "big") + b"\x0a" + b"x" * 600_000
"""The first part of a message of 1 MB."""


class HalfMessages(Hostile):
    """Keeps 200 calls open, each with the largest incomplete message that the gateway allows."""

    async def run(self) -> None:
        await asyncio.gather(*(self._connect() for _ in range(NUM_CONNECTIONS)))

    async def _connect(self) -> None:
        while True:
            with suppress(ConnectionError):
                async with connection(self.target.grpc) as own, asyncio.TaskGroup() as calls:
                    for _ in range(NUM_CALLS):
                        calls.create_task(self._hold(own))
            self.counts["connections ended"] += 1

    async def _hold(self, own: Connection) -> None:
        while not own.is_closed:
            stream = own.open(GENERATE)
            await own.upload(stream, HALF)
            self.is_ready.set()
            with suppress(ConnectionError):
                trailers = await own.wait_ended(stream)
                self.counts[f"status {trailers.get('grpc-status', 'none')}"] += 1
