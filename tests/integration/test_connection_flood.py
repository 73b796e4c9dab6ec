"""A flood of connections to a rank's port keeps out no peer that has the token."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.core.membership import PortAddress
from tandem.net.listener import Listener, connect
from tests.waiting import PATIENCE_S

NUM_PEERS = 20
FLOOD = """
import socket, sys, time
host, port, per_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kept, began = [], time.monotonic()
print("flooding", flush=True)
while time.monotonic() - began < 60:
    for _ in range(per_s // 10):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((host, port))
        kept.append(one)
    while len(kept) > 600:
        kept.pop(0).close()
    time.sleep(0.1)  # time: the rate of connections is what is tested
"""


@contextmanager
def flooded(address: PortAddress, per_s: int) -> Iterator[None]:
    """Another process opens ``per_s`` connections a second and sends nothing on them."""
    args = [sys.executable, "-c", FLOOD, address.host, str(address.port), str(per_s)]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"flooding\n"
        try:
            yield
        finally:
            flood.kill()


async def test_a_flood_keeps_out_nobody_who_has_the_token() -> None:
    served = 0

    async def serve(
        greeting: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal served
        served += 1
        await reader.read()

    listener = Listener("127.0.0.1", 1, serve)
    address = await listener.listen()
    with flooded(address, per_s=3000):
        async with asyncio.timeout(PATIENCE_S):
            for number in range(NUM_PEERS):
                _, writer = await connect("peer", address, bytes([number]))
                writer.close()
    assert served == NUM_PEERS
    await listener.stop()
