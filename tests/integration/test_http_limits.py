"""Silent connections, slow requests and clients that do not read never block the HTTP port."""

import asyncio
import socket

import pytest

from benchmarks.hostile.kinds.sockets import has_ended
from tandem.cluster.entrypoints import http_limits
from tandem.cluster.entrypoints.server import Server
from tandem.core.config import load
from tests.integration.test_http_port import SETS, ask
from tests.waiting import PATIENCE_S, turns, until

NUM_HELD = 40


async def connected(server: Server, num: int) -> list[socket.socket]:
    host, _, port = str(server.addresses["http"]).rpartition(":")
    made = [socket.create_connection((host, int(port))) for _ in range(num)]
    for one in made:
        one.setblocking(False)
    return made


async def test_silent_connections_fail_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_HTTP_CONNECTIONS", NUM_HELD)
    monkeypatch.setattr(http_limits, "MAX_EXCHANGE_S", 10 * PATIENCE_S)
    async with Server(load(None, list(SETS))) as server:
        silent = await connected(server, 2 * NUM_HELD)
        assert await ask(server, "/livez") == (200, "alive\n")
        await until(lambda: sum(map(has_ended, silent)) >= NUM_HELD)
        assert await ask(server, "/livez") == (200, "alive\n")
        for one in silent:
            one.close()


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n", b"POST /livez HTT"])
async def test_half_a_request_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_limits, "MAX_EXCHANGE_S", 0.2)
    async with Server(load(None, list(SETS))) as server:
        [slow] = await connected(server, 1)
        slow.sendall(sent)
        await until(lambda: has_ended(slow))
        slow.close()


async def test_a_connection_that_is_used_again_has_its_time_again() -> None:
    async with Server(load(None, list(SETS))) as server:
        [kept] = await connected(server, 1)
        reader, writer = await asyncio.open_connection(sock=kept)
        for _ in range(3):
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"alive\n")).startswith(b"HTTP/1.1 200")
            await turns()
        writer.close()
