"""Detection of clients that read a stream too slowly."""

import asyncio
from collections.abc import Awaitable, Callable

from tandem.core.answer import Piece
from tandem.core.errors import Draining

MIN_BYTES_PER_S = 4096.0
"""Minimum read rate of a client while pieces wait for it, in bytes per second.

A token takes about 25 bytes, or 250 with 20 log probabilities. Pieces do not wait if the model is
slower than the client.
"""
MAX_UNREAD_ANSWER_BYTES = 384 << 10
"""Maximum unread bytes of an answer. Their size in memory is about ten times larger."""
STALLED_S = 1.0
"""Lag in seconds above which a stream may be ended to admit another one."""
WritePiece = Callable[[Piece], Awaitable[None]]


class PieceWriter:
    """Writes the pieces of one stream and tracks how far its client lags.

    A client may lag by at most ``max_lag_s`` seconds.
    """

    def __init__(self, max_lag_s: float) -> None:
        self._max_lag_s = max_lag_s
        self._lag_s = 0.0
        self._waiting_since: float | None = None

    @property
    def lag_s(self) -> float:
        """Seconds that pieces have waited in excess of the time that MIN_BYTES_PER_S allows."""
        if self._waiting_since is None:
            return self._lag_s
        return self._lag_s + asyncio.get_running_loop().time() - self._waiting_since

    async def write(self, piece: Piece, write: WritePiece) -> None:
        """Write a piece to the client.

        Raises:
            Draining: The client lags too much.
        """
        now = asyncio.get_running_loop().time
        self._waiting_since = now()
        try:
            async with asyncio.timeout(self._max_lag_s - self._lag_s):
                await write(piece)
        except TimeoutError:
            raise Draining(
                f"the client left the answer unread for {self._max_lag_s:g} s "
                f"(server.write_timeout_s), or read fewer than {MIN_BYTES_PER_S:g} bytes per "
                "second; resume it"
            ) from None
        waited_s = now() - self._waiting_since
        self._waiting_since = None
        self._lag_s = max(0.0, self._lag_s + waited_s - piece.num_bytes / MIN_BYTES_PER_S)
