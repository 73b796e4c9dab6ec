"""Bounds on the connections of an HTTP port, which uvicorn lacks."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HTTP_CONNECTIONS = 128
"""Maximum number of open connections.

A further one closes the connection whose time limit ends first.
"""
MAX_EXCHANGE_S = 20.0
"""Seconds in which a connection must send a whole request and read the response."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 connection with a time limit, so that it cannot be held open without use.

    The clock starts with the connection and restarts after each response. A client that is silent,
    sends a byte now and then or does not read runs out of time.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()
        if len(self.connections) > MAX_HTTP_CONNECTIONS:
            oldest: Any = min(self.connections, key=lambda connection: connection.since)  # type: ignore[union-attr]
            oldest.transport.abort()
            self.connections.discard(oldest)

    def on_response_complete(self) -> None:
        self._clock.cancel()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clock.cancel()
        super().connection_lost(exc)

    def _start_clock(self) -> None:
        self.since = self.loop.time()
        self._clock = self.loop.call_later(MAX_EXCHANGE_S, self.transport.abort)
