"""A long text delays no other request, however long its tokenising takes."""

import asyncio
import gc
import time

import pytest

from tandem.cluster.client.client import AsyncClient
from tandem.cluster.gateway import tokenising
from tandem.cluster.gateway.tokenising import TokeniserThreads
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.config import TINY_MODEL
from tandem.core.errors import Overloaded, TextTooLong
from tandem.core.request import RawRequest
from tandem.text.tokenizer import Tokenizer
from tests.integration.echo_gateway import EchoGateway, echo_server
from tests.integration.test_hostile_clients import HeldTokenizer, stub_of
from tests.waiting import until

NUM_CHARS = 1_000_000


async def longest_pause_s(work: asyncio.Future[object]) -> float:
    """Return the longest time in which the event loop was blocked while ``work`` ran."""
    longest = 0.0
    while not work.done():
        before = time.thread_time(), time.monotonic()
        await asyncio.sleep(0)
        longest = max(longest, time.monotonic() - before[1] - (time.thread_time() - before[0]))
    return longest


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "a", " "])
async def test_the_loop_turns_while_a_text_is_tokenised(text: str) -> None:
    tokenizer = Tokenizer(TINY_MODEL)
    text *= NUM_CHARS // len(text)
    began = time.monotonic()
    work = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, text))
    pause_s = await longest_pause_s(work)
    took_s = time.monotonic() - began
    assert len(await work) > NUM_CHARS // 100
    # time: a share of the time that the text takes, on any machine
    assert pause_s < took_s / 4, f"it stood still for {pause_s:.3f} s of {took_s:.3f}"


def test_a_text_that_is_too_long_has_no_list_of_ids() -> None:
    tokenizer = Tokenizer(TINY_MODEL)
    num_tokens = len(tokenizer.encode("abc " * 100))
    with pytest.raises(TextTooLong) as caught:
        tokenizer.encode("abc " * 100, 50)
    assert caught.value.num_tokens in (num_tokens, num_tokens - 1)


async def test_short_texts_do_not_wait_for_a_long_one() -> None:
    gateway = EchoGateway()
    gateway.tokenizer = held = HeldTokenizer()
    async with echo_server(gateway, "model.max_model_len=200000") as server:
        gateway.model = gateway.model.__class__("echo", "x", 200_000, 300, (2,), 3, True, "float32")
        async with AsyncClient(server.address, retry_s=0) as client:
            long_text = "x" * (tokenising.LONG_CHARS + 1)
            slow = asyncio.create_task(client.complete(long_text, max_tokens=1))
            await until(lambda: held.num_begun == 1)
            gateway.tokenizer = EchoGateway().tokenizer
            assert (await client.complete("abc", max_tokens=4)).token_ids
            assert not slow.done()
            held.go_on.set()
            await slow


TEXT = "x" * 100_000


class Tokens:
    """Tokens of a text that is then refused."""


class RefusingTokenizer(HeldTokenizer):
    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        super().encode(text)
        tokens = Tokens()
        raise TextTooLong(tokens.__sizeof__())


def is_of_a_text(one: object) -> bool:
    return type(one) is Tokens or (type(one) is RawRequest and one.prompt == TEXT)


@pytest.mark.parametrize("leaves", [False, True], ids=["refused", "client gone"])
async def test_no_call_that_has_ended_keeps_its_text(leaves: bool) -> None:
    """Memory must be freed without the garbage collector, which may run minutes later."""
    gateway = EchoGateway()
    gateway.tokenizer = held = RefusingTokenizer()
    async with echo_server(gateway) as server, stub_of(server.address) as stub:
        gc.collect()
        gc.disable()
        try:
            for num in range(1, 4):
                call = stub.Generate(pb.GenerateRequest(text=TEXT))
                reading = asyncio.ensure_future(call.read())
                await until(lambda num=num: held.num_begun == num)
                if leaves:
                    call.cancel()
                held.go_on.set()
                await asyncio.gather(reading, return_exceptions=True)
                await until(lambda: not server._streams and not server._threads.num_chars)
                held.go_on.clear()
                del call, reading
            await until(lambda: not any(map(is_of_a_text, gc.get_objects())))
        finally:
            gc.enable()


async def test_memory_of_a_long_text_goes_back_also_when_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(tokenising, "_trim", lambda pad: events.append("trimmed"))
    threads = TokeniserThreads()

    def refuse() -> None:
        events.append("refused")
        raise TextTooLong(1)

    await threads.run(tokenising.TRIM_CHARS - 1, lambda: events.append("short"))
    with pytest.raises(TextTooLong):
        await threads.run(tokenising.TRIM_CHARS, refuse)
    assert events == ["short", "refused", "trimmed"]
    threads.close()


async def test_texts_that_wait_are_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "MAX_CHARS", 100)
    threads = TokeniserThreads()
    assert await threads.run(1000, lambda: "alone it may be longer") == "alone it may be longer"
    held = HeldTokenizer()
    await until(lambda: not threads.num_chars)
    first = asyncio.create_task(threads.run(60, lambda: held.encode("x")))
    await until(lambda: held.num_begun == 1)
    with pytest.raises(Overloaded, match="busy with 60 characters of other requests"):
        await threads.run(60, lambda: None)
    first.cancel()
    with pytest.raises(Overloaded):
        await threads.run(60, lambda: None)
    held.go_on.set()
    await until(lambda: not threads.num_chars)
    assert await threads.run(60, lambda: "again") == "again"
    threads.close()


async def test_long_texts_that_wait_keep_no_short_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts of megabytes may use up the bound on waiting characters."""
    monkeypatch.setattr(tokenising, "LONG_CHARS", 50)
    monkeypatch.setattr(tokenising, "MAX_CHARS", 100)
    threads, held = TokeniserThreads(), HeldTokenizer()
    long = asyncio.create_task(threads.run(100, lambda: held.encode("x")))
    await until(lambda: held.num_begun == 1)
    assert await threads.run(10, lambda: "short") == "short"
    with pytest.raises(Overloaded):
        await threads.run(51, lambda: None)
    held.go_on.set()
    await long
    threads.close()
