"""How fast the client of a stream reads, and when it reads too slowly to be waited for."""

import asyncio
from collections.abc import Awaitable, Callable

from tandem.core.answer import Piece
from tandem.core.errors import Draining

MIN_BYTES_PER_S = 4096.0
"""Rate at which a client that makes a piece wait has to read. A token is some 25 bytes, with 20 log
probabilities 250. Where the model is slower than that no piece waits."""
MAX_UNREAD_ANSWER_BYTES = 384 << 10
"""Maximum of an answer that is written and not read; in memory that is some ten times as much."""
STALLED_S = 1.0
"""Lag from which on a stream may be ended so that another one has room."""
WritePiece = Callable[[Piece], Awaitable[None]]


class PieceWriter:
    """The client of one stream as a reader. It may lag by at most ``max_lag_s``."""

    def __init__(self, max_lag_s: float) -> None:
        self._max_lag_s = max_lag_s
        self._lag_s = 0.0
        self._waiting_since: float | None = None

    @property
    def lag_s(self) -> float:
        """Seconds for which pieces have waited beyond those that MIN_BYTES_PER_S allows."""
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
                f"the answer was left unread for {self._max_lag_s:g} s (server.write_timeout_s), "
                f"or read more slowly than {MIN_BYTES_PER_S:g} bytes a second; resume it"
            ) from None
        waited_s = now() - self._waiting_since
        self._waiting_since = None
        self._lag_s = max(0.0, self._lag_s + waited_s - piece.num_bytes / MIN_BYTES_PER_S)
