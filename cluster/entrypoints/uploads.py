"""Bounds on messages that are being received: their number, size and time.

grpc buffers a message until it is complete. It receives no message that no call awaits: once the
HTTP/2 window is full, the client cannot send.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.cluster.proto.grpc_settings import MAX_MESSAGE_BYTES
from tandem.core.config import TandemConfig
from tandem.core.json_file import read_json

MAX_UPLOADS_PER_CONNECTION = 8
MAX_UPLOADS = 64
UPLOAD_TIMEOUT_S = 10.0
"""Seconds in which a message must arrive completely."""
CONTENDED_UPLOAD_TIMEOUT_S = 1.0
"""Seconds in which a message must arrive completely while other messages wait to be received."""
BASE_MESSAGE_BYTES = 1 << 20
BYTES_PER_TOKEN = 24
"""Allowed message bytes per token of the model's maximum length.

A token id takes at most 5 bytes. English text and code take 3 to 5 bytes per token, and runs of
white space many more.
"""


def max_message_bytes(config: TandemConfig) -> int:
    """Return the maximum message size in bytes, which depends on the model's maximum length."""
    raw = read_json(config.model.path / "config.json")
    longest = config.model.max_model_len or raw.get("max_position_embeddings")
    if not isinstance(longest, int):  # loading the model reports what is wrong with the file
        return MAX_MESSAGE_BYTES
    return min(BASE_MESSAGE_BYTES + BYTES_PER_TOKEN * longest, MAX_MESSAGE_BYTES)


class _UploadPermits:
    """Limited number of permits, each to receive one message.

    Permits expire sooner while other messages wait.
    """

    def __init__(self, num_permits: int) -> None:
        self._free = asyncio.Semaphore(num_permits)
        self._num_waiting = 0
        self._started_at: dict[asyncio.Timeout, float] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._started_at or self._num_waiting)

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Wait for a permit. Raises TimeoutError in the block when its time is over."""
        await self._wait()
        try:
            limit_s = CONTENDED_UPLOAD_TIMEOUT_S if self._num_waiting else UPLOAD_TIMEOUT_S
            async with asyncio.timeout(limit_s) as scope:
                self._started_at[scope] = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    del self._started_at[scope]
        finally:
            self._free.release()

    async def _wait(self) -> None:
        if self._free.locked():
            for scope, started_at in self._started_at.items():
                if not scope.expired():
                    scope.reschedule(started_at + CONTENDED_UPLOAD_TIMEOUT_S)
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1


class Uploads:
    """Upload permits of all connections of a server. Owned by one asyncio loop."""

    def __init__(self) -> None:
        self._all = _UploadPermits(MAX_UPLOADS)
        self._of_connection: defaultdict[str, _UploadPermits] = defaultdict(
            lambda: _UploadPermits(MAX_UPLOADS_PER_CONNECTION)
        )

    async def receive(self, messages: AsyncIterator[bytes], connection: str) -> bytes:
        """Return the first of ``messages``, which arrive over ``connection``.

        Raises:
            ValueError: The client closed its side of the call without a message.
            TimeoutError: The message did not arrive completely in time.
        """
        of_connection = self._of_connection[connection]
        try:
            async with of_connection.permit(), self._all.permit():
                async for data in messages:
                    return data
            raise ValueError("the call has no message; send one")
        except TimeoutError:
            raise TimeoutError(
                "the message did not arrive completely in time; send it again"
            ) from None
        finally:
            if of_connection.is_idle:
                self._of_connection.pop(connection, None)
