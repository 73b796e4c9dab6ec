"""Warm-up of a pair of ranks: a tiny request, retried until it is answered."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.cluster.gateway.frame_reader import MAX_RECONNECT_PAUSE_S
from tandem.cluster.gateway.handles import AttemptRoute, RankHandle
from tandem.cluster.gateway.retries import Retries
from tandem.cluster.gateway.router import RankPair
from tandem.core.identity import Identity

log = logging.getLogger(__name__)
SendRequest = Callable[[AttemptRoute], Awaitable[None]]


class WarmUp:
    """A pair of ranks and the task that warms it up.

    First calls and new channels are slow, so no user request should be the first.

    Attributes:
        is_warm: A warm-up request was answered.
        is_refused: The ranks are incompatible, so the warm-up is not retried.
        failure: Error of the latest attempt; None before the first and after a success.
        first_attempt_done: Set once the first attempt, or the task, has ended.
    """

    def __init__(self, ranks: RankPair, send_request: SendRequest) -> None:
        self.ranks = ranks
        self.is_warm = False
        self.is_refused = False
        self.failure: Exception | None = None
        self.first_attempt_done = asyncio.Event()
        self._send_request = send_request
        self._retries = Retries(MAX_RECONNECT_PAUSE_S)
        name = "-".join(["warm-up", *(rank.epoch_name for rank in ranks)])
        self.task = asyncio.create_task(self._run(), name=name)
        self.task.add_done_callback(lambda _: self.first_attempt_done.set())

    @property
    def cause(self) -> str:
        """Reason why the pair gets no requests, in one line; "" if it is warm."""
        if self.is_warm:
            return ""
        partner = self.ranks[0].info.spec.label
        if self.failure is None:
            return f"warming up: no KV hand-over from {partner} yet"
        return f"KV hand-over from {partner} failed: {str(self.failure).partition(chr(10))[0]}"

    async def _run(self) -> None:
        while not (self.is_warm or self.is_refused):
            await self._attempt()
            self.first_attempt_done.set()
            if not (self.is_warm or self.is_refused):
                await self._retries.pause()

    async def _attempt(self) -> None:
        prefill, decode = self.ranks
        try:
            await _wait_until_answering(prefill)
            await _wait_until_answering(decode)
            await self._send_request(AttemptRoute(prefill, decode, Identity("warm-up")))
            self.is_warm = True
            self.failure = None
        except Exception as error:
            log.warning(
                "hand-over test from %s to %s failed: %s",
                prefill.epoch_name,
                decode.epoch_name,
                error,
            )
            self.failure = error
            self.is_refused = isinstance(error, ValueError)


async def _wait_until_answering(rank: RankHandle) -> None:
    await rank.liveness.answering.wait()
