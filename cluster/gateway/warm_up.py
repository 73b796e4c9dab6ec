"""Warm-up of a pair of ranks: a tiny request over it, repeated until one is answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.cluster.gateway.frame_reader import LONGEST_PAUSE_S
from tandem.cluster.gateway.handles import Handle, Pair
from tandem.cluster.gateway.retries import Retries
from tandem.cluster.gateway.router import Ranks
from tandem.core.identity import Identity

log = logging.getLogger(__name__)
SendRequest = Callable[[Pair], Awaitable[None]]


class WarmUp:
    """One pair of ranks and the task that warms it. Channels and first calls are slow, and no
    request of a user shall wait for them.

    Attributes:
        is_warm: A warm-up request was answered.
        is_refused: The ranks cannot work together, so the warm-up is not repeated.
        failure: Error of the latest attempt; None before the first and after a success.
        tried: Set once the first attempt has ended, or the task.
    """

    def __init__(self, ranks: Ranks, send_request: SendRequest) -> None:
        self.ranks = ranks
        self.is_warm = False
        self.is_refused = False
        self.failure: Exception | None = None
        self.tried = asyncio.Event()
        self._send_request = send_request
        self._retries = Retries(LONGEST_PAUSE_S)
        name = "-".join(["warm-up", *(rank.life for rank in ranks)])
        self.task = asyncio.create_task(self._run(), name=name)
        self.task.add_done_callback(lambda _: self.tried.set())

    @property
    def cause(self) -> str:
        """Why the pair gets no requests, in a line; "" if it is warm."""
        if self.is_warm:
            return ""
        partner = self.ranks[0].info.spec.label
        if self.failure is None:
            return f"no hand-over from {partner} yet: warming up"
        return f"no hand-over from {partner}: {str(self.failure).partition(chr(10))[0]}"

    async def _run(self) -> None:
        while not (self.is_warm or self.is_refused):
            await self._try()
            self.tried.set()
            if not (self.is_warm or self.is_refused):
                await self._retries.pause()

    async def _try(self) -> None:
        prefill, decode = self.ranks
        try:
            await _heard(prefill)
            await _heard(decode)
            await self._send_request(Pair(prefill, decode, Identity("warm-up")))
            self.is_warm = True
            self.failure = None
        except Exception as error:
            log.warning("%s and %s do not work together: %s", prefill.life, decode.life, error)
            self.failure = error
            self.is_refused = isinstance(error, ValueError)


async def _heard(rank: Handle) -> None:
    await rank.liveness.heard.wait()
