"""Listening sockets of ranks, open to clients that know a secret token, and their client side."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from tandem.core.errors import RankLost
from tandem.core.membership import PortAddress
from tandem.net.framing import (
    ACCEPTS_PER_TURN,
    BACKLOG,
    GREETING_S,
    PendingHandshakes,
    encode_frame,
    keep_alive,
)

log = logging.getLogger(__name__)
EMPTY_FRAME = encode_frame(b"")
ServeConnection = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """A listening socket that serves connections after a valid greeting. Owned by one asyncio loop.

    A greeting is the token and ``num_bytes`` bytes of data. An empty frame acknowledges it, and
    ``serve`` starts in the same iteration of the loop. A connection is closed when ``serve``
    returns or raises OSError or ValueError, and by ``stop``.

    Args:
        host: Address to listen on.
        num_bytes: Length of the data that follow the token in a greeting.
        serve: Coroutine function ``serve(data, reader, writer)`` that serves one connection.
    """

    def __init__(self, host: str, num_bytes: int, serve: ServeConnection) -> None:
        self._host = host
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._handshakes = PendingHandshakes[asyncio.StreamWriter](
            num_bytes, lambda connection: connection.transport.abort()
        )

    async def listen(self) -> PortAddress:
        """Listen on a free port, if not done already, and return the address.

        Raises ValueError if ``host`` is not an address of this machine.
        """
        if self._server is None:
            try:
                self._server = await asyncio.start_server(
                    self._accept, self._host, 0, backlog=ACCEPTS_PER_TURN
                )
                _raise_backlog(self._server)
            except OSError as error:
                raise ValueError(
                    f"kv_transfer.host={self._host!r}: cannot listen there ({error}); "
                    "set it to an address of this machine"
                ) from error
        port = self._server.sockets[0].getsockname()[1]
        return PortAddress(self._host, port, self._handshakes.token)

    async def stop(self) -> None:
        """Close the listening socket and all connections, and wait for their end."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        self._handshakes.add(writer)
        asyncio.get_running_loop().call_later(GREETING_S, self._handshakes.sweep)
        hello = None
        try:
            keep_alive(writer.get_extra_info("socket"))
            while hello is None:
                data = await reader.read(self._handshakes.num_bytes_needed(writer))
                hello = self._handshakes.feed(writer, data)
            writer.write(EMPTY_FRAME)
            await self._serve(hello, reader, writer)
        except (OSError, ValueError) as error:
            level = logging.WARNING if hello is None else logging.INFO
            log.log(level, "a connection from a peer ended: %r", error)
        finally:
            self._handshakes.forget(writer)
            del self._connections[task]
            writer.close()


def _raise_backlog(server: asyncio.Server) -> None:
    """Raise the kernel's queue of connections to BACKLOG.

    The ``backlog`` of asyncio cannot do that, because it is also the number of connections that
    the loop accepts in one iteration.
    """
    for listening in server.sockets:
        with socket.fromfd(listening.fileno(), listening.family, listening.type) as own:
            own.listen(BACKLOG)


async def connect(
    name: str, address: PortAddress, greeting: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the Listener of the rank ``name`` and wait until it accepts the greeting.

    Raises RankLost if the greeting is not accepted within GREETING_S seconds.
    """
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                keep_alive(writer.get_extra_info("socket"))
                writer.write(encode_frame(address.token + greeting))
                await reader.readexactly(len(EMPTY_FRAME))
            except BaseException:
                writer.close()
                raise
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise RankLost(
            f"{name}: no answer from {address.host}:{address.port}: {error!r}; can this machine "
            "reach that address (kv_transfer.host)?"
        ) from error
    return reader, writer
