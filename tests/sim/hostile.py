"""Clients that would harm other clients if a gateway allowed it."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tandem.cluster.client.options import Prompt
from tandem.cluster.client.stream import StreamPlan
from tandem.cluster.proto import tandem_pb2 as pb
from tests.sim.clients import BACKOFF_S, RETRY_S, Client, Clients
from tests.sim.loop import Process
from tests.sim.readers import Reader
from tests.sim.world import SPARE_STREAMS, World

PAUSE_S, READER_PAUSE_S = 0.02, 0.4
"""Pause of a hostile client before its next request. Slow readers pause longer. Their rate for each
stream slot is that of one real process against a gateway with hundreds of slots."""
NUM_WRITERS, NUM_MORE = 4, 2
"""Number of clients that send long texts; for other kinds, clients beyond the capacity."""
TRICKLE_BYTES_PER_S, NUM_CHARS, HALF_BYTES = 50.0, 2000, 80
"""Read rate, and sizes in characters and bytes. An answer's first message has about 130 bytes here,
others 35."""
LASTS = 2.0
"""Duration of hostile clients divided by that of other faults."""
CLAIMED = [5, 6]
TOKENS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


class HostileClient(Client):
    """One request of such a client, whose answer is not checked."""

    def __init__(self, number: int, prompt: Prompt, options: Any, reader: Reader) -> None:
        super().__init__(number, StreamPlan(prompt, options, RETRY_S, BACKOFF_S), ())
        self.reader = reader

    def take(self, response: pb.GenerateResponse) -> str:
        """Accept any message."""
        self.plan.receive(response)
        return ""


class HostileClients:
    """Hostile clients of one world. Each sends one request after another."""

    def __init__(self, world: World, clients: Clients, draw: random.Random) -> None:
        self._world, self._clients, self._draw = world, clients, draw
        self._num_begun = 0
        self._open: dict[Process, HostileClient] = {}

    def trickle(self, for_s: float) -> None:
        """Read only a few bytes a second."""
        num = self._num_streams() + NUM_MORE
        self._begin(num, for_s, self._tokens, lambda: Reader(TRICKLE_BYTES_PER_S), READER_PAUSE_S)

    def half_read(self, for_s: float) -> None:
        """Read only the first bytes of each answer."""
        num = self._num_streams() + NUM_MORE
        half = lambda: Reader(stalls_after=HALF_BYTES)  # noqa: E731
        self._begin(num, for_s, self._tokens, half, READER_PAUSE_S)

    def claims(self, for_s: float) -> None:
        """Resume answers that were never started."""
        num = self._world.config.decode.num_rows + NUM_MORE
        self._begin(num, for_s, self._tokens, Reader, resume_token_ids=CLAIMED)

    def long_texts(self, for_s: float) -> None:
        """Send texts that are refused after they are tokenised."""
        self._begin(NUM_WRITERS, for_s, lambda: "x" * NUM_CHARS, Reader)

    def end(self) -> None:
        """Close every stream and start no more."""
        for process, client in self._open.items():
            process.kill()
            if client.cancel is not None:
                client.cancel()
        self._open.clear()

    def _num_streams(self) -> int:
        """Return the maximum number of streams that a gateway has open."""
        config = self._world.config
        return config.decode.num_rows + config.server.max_queued + SPARE_STREAMS

    def _tokens(self) -> Prompt:
        return [self._draw.randrange(3, 90) for _ in range(4)]

    def _begin(
        self,
        num: int,
        for_s: float,
        prompt: Callable[[], Prompt],
        reader: Callable[[], Reader],
        pause_s: float = PAUSE_S,
        **options: Any,
    ) -> None:
        ends_at = self._world.loop.time() + LASTS * for_s
        for _ in range(num):
            self._num_begun += 1
            process = Process(self._world.loop, f"hostile-{self._num_begun}")
            process.start(self._repeat(process, ends_at, prompt, reader, pause_s, options))

    async def _repeat(
        self,
        process: Process,
        ends_at: float,
        prompt: Callable[[], Prompt],
        reader: Callable[[], Reader],
        pause_s: float,
        more: dict[str, Any],
    ) -> None:
        number = 0
        while self._world.loop.time() < ends_at:
            number += 1
            options = TOKENS | more | {"request_id": f"{process.name}-{number}"}
            made = HostileClient(-1, prompt(), options, reader())
            self._open[process] = made
            serving = [one for one in self._world.gateways if one.is_serving]
            if serving and serving[0].process.is_alive:
                await self._clients.stream(made, process, serving[0])
            await asyncio.sleep(pause_s)  # time: virtual
        self._open.pop(process, None)
