"""Malformed requests and abrupt disconnects cause no server error and leave nothing held.

A real server process over loopback. ``FUZZ_SEED`` repeats a run's messages, but not its timing.
"""

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from benchmarks.harness.exact import near_ties
from benchmarks.harness.procs import Serving, serving
from tandem import AsyncClient
from tandem.cluster.entrypoints.grpc_server import SERVICE
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto.grpc_settings import STREAM_KEY
from tandem.core.config import TINY_MODEL
from tests.fuzz import NAMES, mutated, ordinary, wild
from tests.waiting import until

NUM_SHORT, NUM_LONG, LONG_S = 400, 20_000, 60.0
NUM_CLIENTS = 16
MOST_PIECES = 6
"""Maximum pieces read of one answer; a random max_tokens may request thousands."""
PATIENCE_S = 60
SETS = ("decode.max_num_seqs=6", "server.max_queued=12", "kv.num_pages=400", "kv.page_size=16")
PROMPT = [0, *range(50, 90)]

Code = grpc.StatusCode
EXPECTED = {
    Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.CANCELLED,
    Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION,
}  # fmt: skip
GENERATE, HEALTH = f"/{SERVICE}/Generate", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNARY = (f"/{SERVICE}/Abort", f"/{SERVICE}/GetModelInfo", f"/{SERVICE}/GetStatus", HEALTH)


@dataclass
class Fuzzer:
    """Makes many random calls from one seed. ``unexpected`` lists calls with an illegal outcome."""

    random: Random
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    num_sent: int = 0

    async def run(self, address: str, num_requests: int, at_least_s: float = 0.0) -> None:
        """Send at least ``num_requests`` calls, and continue until ``at_least_s`` has passed."""
        ends = asyncio.get_running_loop().time() + at_least_s

        async def client() -> None:
            async with grpc.aio.insecure_channel(
                address, (("grpc.use_local_subchannel_pool", 1),)
            ) as channel:
                while self.num_sent < num_requests or asyncio.get_running_loop().time() < ends:
                    self.num_sent += 1
                    await self._act(channel)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _act(self, channel: grpc.aio.Channel) -> None:
        acts = (
            self.ordinary,
            self.wild,
            self.mutated,
            self.other,
            self.dropped,
            self.hurried,
            self.again,
        )
        act = self.random.choices(acts, (3, 5, 9, 8, 2, 1, 1))[0]
        allowed, what = EXPECTED, act.__name__
        if act == self.again:
            allowed = EXPECTED | {Code.UNAVAILABLE}
        if act == self.other:
            allowed = EXPECTED | {Code.NOT_FOUND, Code.UNIMPLEMENTED}
        try:
            await act(channel)
            code, details = Code.OK, ""
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        self.codes[what, code.name] += 1
        if code not in allowed:
            self.unexpected.append(f"{what}: {code.name}: {details[:300]}")

    async def ordinary(self, channel: grpc.aio.Channel) -> None:
        """Read an answer to its end, which must occur exactly once for each of its n answers."""
        message = ordinary(self.random)
        num_ends = 0
        async for piece in generate(channel, message.SerializeToString()):
            num_ends += pb.GenerateResponse.FromString(piece).HasField("finished")
        assert num_ends == (message.sampling.n or 1), message

    async def wild(self, channel: grpc.aio.Channel) -> None:
        await begin(channel, wild(self.random).SerializeToString(), MOST_PIECES)

    async def mutated(self, channel: grpc.aio.Channel) -> None:
        make = self.random.choice((ordinary, wild))
        data = mutated(self.random, make(self.random).SerializeToString())
        await begin(channel, data, MOST_PIECES)

    async def dropped(self, channel: grpc.aio.Channel) -> None:
        """Disconnect at a random point: before the first piece, in the middle, or without
        reading."""
        message = ordinary(self.random)
        message.sampling.max_tokens = self.random.choice((1, 20, 200))
        call = generate(channel, message.SerializeToString())
        # time: any is right
        await asyncio.sleep(self.random.choice((0, 0.001, 0.01, 0.05)))
        for _ in range(self.random.choice((0, 0, 1, 3))):
            if await call.read() is grpc.aio.EOF:
                break
        call.cancel()

    async def hurried(self, channel: grpc.aio.Channel) -> None:
        data = ordinary(self.random).SerializeToString()
        timeout_s = self.random.choice((0.0, 0.001, 0.005, 0.02))
        await begin(channel, data, MOST_PIECES, timeout=timeout_s)

    async def again(self, channel: grpc.aio.Channel) -> None:
        """Attempt few streams with few nonces, so that later attempts end earlier ones. Adds odd
        metadata."""
        message = ordinary(self.random)
        message.request_id = f"again-{self.random.choice(NAMES)}"
        odd: list[tuple[str, str | bytes]] = [("x" * 40, "y" * 400), ("k-bin", b"\x00\xff")]
        nonce = self.random.choice(("", "n", "\x7e" * 300))
        metadata = [(STREAM_KEY, nonce), *self.random.choices(odd, k=self.random.randrange(3))]
        await begin(channel, message.SerializeToString(), MOST_PIECES, metadata=metadata)

    async def other(self, channel: grpc.aio.Channel) -> None:
        """Call the other methods, and some that do not exist."""
        name = self.random.choice((*NAMES, "again-a", "", "\x00", "q" * 3000))
        data = pb.AbortRequest(request_id=name).SerializeToString()
        if self.random.random() < 0.5:
            data = mutated(self.random, data)
        method = self.random.choice(
            (*UNARY, UNARY[0], UNARY[2], REFLECTION, f"/{SERVICE}/None", GENERATE)
        )
        if method == REFLECTION:
            async for _ in channel.stream_stream(method)(iter([data]), timeout=PATIENCE_S):
                pass
        elif method == GENERATE:
            await begin(channel, self.random.randbytes(self.random.randrange(40)), MOST_PIECES)
        else:
            await channel.unary_unary(method)(data, timeout=PATIENCE_S)


def generate(channel: grpc.aio.Channel, data: bytes, **options: Any) -> Any:
    return channel.unary_stream(GENERATE)(data, **({"timeout": PATIENCE_S} | options))


async def begin(channel: grpc.aio.Channel, data: bytes, num_pieces: int, **options: Any) -> None:
    """Read ``num_pieces`` pieces, then cancel."""
    call = generate(channel, data, **options)
    for _ in range(num_pieces):
        if await call.read() is grpc.aio.EOF:
            break
    call.cancel()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(*SETS) as running:
        yield running


@pytest.fixture
def fuzzer(request: pytest.FixtureRequest) -> Fuzzer:
    """The long form uses a new seed each time."""
    is_long = request.node.get_closest_marker("slow") is not None
    seed = int(os.environ.get("FUZZ_SEED") or (secrets.randbits(32) if is_long else 1))
    print(f"FUZZ_SEED={seed}")
    return Fuzzer(Random(seed))


async def check_unharmed(server: Serving, fuzzer: Fuzzer) -> None:
    """Check that nothing is held anywhere, and that the server still gives exact answers."""
    print(sorted(fuzzer.codes.items()))
    assert not fuzzer.unexpected, fuzzer.unexpected[:20]
    async with AsyncClient(server.address) as client:
        await until(lambda: is_empty(client))
        answer = await client.complete(PROMPT, max_tokens=24, ignore_eos=True)
    assert not near_ties(TINY_MODEL, PROMPT, list(answer.token_ids))
    async with grpc.aio.insecure_channel(server.address) as channel:
        data = await channel.unary_unary(HEALTH)(b"")
    health = health_pb2.HealthCheckResponse
    assert health.FromString(data).status == health.SERVING
    assert "Traceback" not in "".join(server.log), "".join(server.log)[-8000:]


async def is_empty(client: AsyncClient) -> bool:
    status = await client.status()
    assert len(status.ranks) == 2
    return not status.num_running and all(
        node.alive
        and not node.num_active_rows
        and not node.num_open_leases
        and node.num_free_tokens == node.max_tokens
        for node in status.ranks
    )


async def test_no_message_harms_the_server(server: Serving, fuzzer: Fuzzer) -> None:
    await fuzzer.run(server.address, NUM_SHORT)
    await check_unharmed(server, fuzzer)
    assert len({code for _, code in fuzzer.codes}) >= 5, "too tame"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_message_harms_the_server_for_long(server: Serving, fuzzer: Fuzzer) -> None:
    await fuzzer.run(server.address, NUM_LONG, LONG_S)
    await check_unharmed(server, fuzzer)
