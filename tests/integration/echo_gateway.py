"""A gateway that computes answers from the prompt alone, to test the servers without a cluster."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tandem import InferenceError
from tandem.cluster.entrypoints.server import Server
from tandem.core.answer import Delta, Finished, SpeculationCounts, Timings, TransferStats, Usage
from tandem.core.config import TandemConfig, load
from tandem.core.info import DEGRADED, NOT_SERVING, SERVING, ModelInfo, RankStatus, ServerStatus
from tandem.core.request import Request

EOS = 2
STORY = "Zwei Bären 🐻🐻 aßen Käse. "


class ByteTokenizer:
    """One token per byte, its value plus three; 1 starts a text and ``EOS`` ends one."""

    max_token_bytes = None
    special_tokens: dict[str, int] = {}

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        return [1, *(byte + 3 for byte in text.encode())]


def answer_to(prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Return part of the story, starting at an offset that depends on the prompt."""
    story = STORY.encode()
    return tuple(story[(sum(prompt_ids) + i) % len(story)] + 3 for i in range(num_tokens))


def text_of(token_ids: tuple[int, ...]) -> str:
    """Decode complete characters only; bytes that start no character are left out."""
    return bytes(token - 3 for token in token_ids).decode(errors="ignore")


class EchoGateway:
    """Sends two tokens per delta. After ``hold_after`` tokens an answer waits for ``go_on``.
    ``failures`` are raised one after another, each after its number of new tokens."""

    model = ModelInfo(
        "echo", "DeepseekV3ForCausalLM", 128, 300, (EOS,), 3, True, "float32", digest="ec40"
    )

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.hold_after: int | None = None
        self.max_streams = 1000
        self.proof_key = bytes(32)
        self.state = SERVING
        self.go_on = asyncio.Event()
        self.failures: list[tuple[int, BaseException]] = []
        self.requests: list[Request] = []
        self.num_closed = 0

    def is_healthy(self) -> bool:
        return True

    async def status(self, num_running: int) -> ServerStatus:
        node = RankStatus(
            "decode-0", "decode", 1, True, 3, num_active_rows=1, num_free_tokens=2,
            num_open_leases=4, num_channels=5, counters={"num_steps": 6},
        )  # fmt: skip
        return ServerStatus(self.state, "disaggregated", num_running, (node,))

    def check_queue(self, num_answers: int, is_resumed: bool = False) -> None:
        """Accept every request, as if the queue were never full."""

    def start_answers(self, request: Request) -> SimpleNamespace:
        aborted = asyncio.Event()

        def abort() -> None:
            aborted.set()
            self.go_on.set()

        return SimpleNamespace(pieces=lambda: self.generate(request, aborted), abort=abort)

    async def generate(
        self, request: Request, aborted: asyncio.Event
    ) -> AsyncGenerator[Delta | Finished, None]:
        self.requests.append(request)
        num_before = len(request.output_ids)
        limit, failure = self.failures.pop(0) if self.failures else (1 << 30, None)
        tokens = answer_to(request.prompt_ids, request.sampling.max_tokens)
        assert tokens[:num_before] == request.output_ids
        try:
            i = num_before
            while i < len(tokens):
                if i - num_before >= limit and failure is not None:
                    raise failure
                if self.hold_after is not None and i >= self.hold_after:
                    await self.go_on.wait()
                if aborted.is_set():
                    break
                piece = tokens[i : i + 2]
                text = text_of(tokens[: i + 2])[len(text_of(tokens[:i])) :]
                for index in range(request.sampling.n):
                    yield Delta(index, piece, text)
                await asyncio.sleep(0)
                i += len(piece)
            if failure is not None:
                raise failure
            for index in range(request.sampling.n):
                yield _finished(
                    request, i - num_before, "abort" if aborted.is_set() else "length", index
                )
        finally:
            self.num_closed += 1


def _finished(request: Request, num_tokens: int, reason: str, index: int) -> Finished:
    return Finished(
        index=index,
        finish_reason=reason,
        usage=Usage(prompt=len(request.prompt_ids), completion=num_tokens),
        speculation=SpeculationCounts(1, 3, 2, (1, 1, 0), 2, (1, 1, 1)),
        timings_ms=Timings(1.0, 2.0, 3.0, 4.0, 5.0),
        kv_transfer=TransferStats(10, 20, "gloo", 0.5),
        seed=request.sampling.seed or 0,
    )


@asynccontextmanager
async def launch(
    config: TandemConfig, ray_address: str | None = None, on_progress: Any = print
) -> AsyncIterator[EchoGateway]:
    """Replace ``launch`` of cluster/control/launch.py."""
    on_progress(f"launching {config.mode}")
    gateway = EchoGateway()
    if config.model.max_model_len == 2:
        gateway.hold_after = 4
    gateway.state = {1: DEGRADED, 2: NOT_SERVING}.get(config.decode.max_num_seqs, SERVING)
    yield gateway


@asynccontextmanager
async def echo_server(gateway: EchoGateway, *sets: str) -> AsyncIterator[Server]:
    """Run a server on a free port that drains for 0.3 s; check that every stream was closed."""
    config = load(None, ["server.address=127.0.0.1:0", "server.drain_timeout_s=0.3", *sets])
    async with Server(config) as server:
        await server.attach(gateway)
        yield server
    assert gateway.num_closed == len(gateway.requests)


async def failure_of(call: Awaitable[object]) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await call
    return caught.value
