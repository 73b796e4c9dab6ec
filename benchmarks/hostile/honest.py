"""Well-behaved clients: streams, clients that reconnect, and probes of the HTTP port."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tandem import AsyncClient, InferenceError

MAX_TOKENS = 48
ANSWER_S = 30.0
"""Time after which an answer counts as refused."""
NEWCOMER_S = 0.5
"""Time between two new connections, and between two probes."""


class OwnConnection(AsyncClient):
    """A client that shares its TCP connection with no other client of this process."""

    _open_channel = staticmethod(
        lambda address, options: AsyncClient._open_channel(
            address, options=(*options, ("grpc.use_local_subchannel_pool", 1))
        )
    )


@dataclass
class Figures:
    """Times of honest requests in seconds, and what went wrong.

    Attributes:
        ttfts_s: Time from a request to its first token.
        gaps_s: Times between two pieces of a stream.
        refused: Errors of streams, whose connections existed before.
        turned_away: Errors of clients with a new connection.
        failed_probes: Errors of requests to /livez.
    """

    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    turned_away: list[str] = field(default_factory=list)
    failed_probes: list[str] = field(default_factory=list)

    def add(self, other: "Figures") -> None:
        """Add the figures of another round."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def note(self, sent_at: float, moments: Sequence[float]) -> None:
        """Add a stream's request and the moments of its pieces."""
        self.ttfts_s.append(moments[0] - sent_at)
        self.gaps_s += [later - earlier for earlier, later in pairwise(moments)]


@asynccontextmanager
async def streams(address: str, num: int) -> AsyncIterator[list[OwnConnection]]:
    """Connect ``num`` clients, which never retry."""
    clients = [OwnConnection(address, retry_s=0) for _ in range(num)]
    try:
        yield clients
    finally:
        for client in clients:
            await client.close()


async def measure(
    clients: Sequence[AsyncClient], texts: Sequence[str], addresses: tuple[str, str]
) -> Figures:
    """Send all ``texts``, one after another from each client, in parallel with newcomers and
    probes."""
    found, queue = Figures(), [*texts]
    grpc_address, http_address = addresses
    beside = [
        asyncio.create_task(_newcomers(grpc_address, texts[0], found)),
        asyncio.create_task(_probes(http_address, found)),
    ]

    async def work(client: AsyncClient) -> None:
        while queue:
            await _ask(client, queue.pop(), found)

    await asyncio.gather(*map(work, clients))
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return found


async def _ask(client: AsyncClient, text: str, found: Figures) -> None:
    options: Any = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    moments: list[float] = []
    sent_at = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_S):
            async for piece in client.generate(text, **options):
                if piece.token_ids:
                    moments.append(time.monotonic())
        found.note(sent_at, moments)
    except InferenceError as error:
        found.refused.append(str(error))
    except TimeoutError:
        found.refused.append(f"no answer in {ANSWER_S:g} s, {len(moments)} pieces")


async def _newcomers(address: str, text: str, found: Figures) -> None:
    while True:
        async with OwnConnection(address, retry_s=0) as client:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await client.complete(text, max_tokens=1)
            except (InferenceError, TimeoutError) as error:
                found.turned_away.append(str(error))
        await asyncio.sleep(NEWCOMER_S)


async def _probes(address: str, found: Figures) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def probe() -> None:
        with opener.open(f"http://{address}/livez", timeout=10) as answer:
            answer.read()

    while True:
        try:
            await asyncio.to_thread(probe)
        except OSError as error:
            found.failed_probes.append(str(error))
        await asyncio.sleep(NEWCOMER_S)
