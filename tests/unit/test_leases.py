import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.config import load
from tandem.core.errors import HandoverError
from tandem.core.identity import Identity
from tandem.kv_transfer.messages import Seal
from tandem.kv_transfer.offer_book import ENDED_KEEP_S, ComputedTokens, OfferBook
from tests.waiting import turns

KEY, OTHER = Identity("r"), Identity("r")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def nothing() -> None:
    pass


def test_a_lease_expires_once_and_only_when_not_renewed() -> None:
    clock = Clock()
    book = OfferBook(30.0, clock)
    book.open(KEY, nothing)
    clock.now += 29
    assert not book.sweep()
    book.renew(KEY)
    clock.now += 29
    assert not book.sweep()
    clock.now += 1
    assert list(book.sweep()) == [KEY] and not book.sweep() and not book.open_identities()


def test_a_lease_that_ran_out_cannot_be_renewed_before_the_sweep() -> None:
    clock = Clock()
    book = OfferBook(1.0, clock)
    book.open(KEY, nothing)
    clock.now += 1
    with pytest.raises(HandoverError, match="the lease of 1.0 s expired"):
        book.renew(KEY)
    assert list(book.sweep()) == [KEY]


def test_release_is_idempotent_and_opening_is_not() -> None:
    book = OfferBook(1.0, Clock())
    book.open(KEY, nothing)
    with pytest.raises(AssertionError, match="was opened twice"):
        book.open(KEY, nothing)
    assert book.end(KEY, "done") and not book.end(KEY, "again") and not book.open_identities()


def test_no_lease_without_a_length() -> None:
    with pytest.raises(ValueError, match="lease_s"):
        load(None, ["kv_transfer.lease_s=0.0"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("gnrst"), st.integers(0, 4)), max_size=80))
def test_random_use_agrees_with_a_model(operations: list[tuple[str, int]]) -> None:
    clock = Clock()
    book = OfferBook(3.0, clock)
    keys = [Identity("r") for _ in range(5)]
    ends: dict[Identity, float] = {}
    for operation, number in operations:
        key = keys[number]
        if operation == "g" and key not in ends:
            keys[number] = key = Identity("r")
            assert book.open(key, nothing)
            ends[key] = clock.now + 3.0
        elif operation == "n" and key in ends:
            if ends[key] > clock.now:
                book.renew(key)
                ends[key] = clock.now + 3.0
            else:
                with pytest.raises(HandoverError):
                    book.renew(key)
        elif operation == "r":
            assert (book.end(key, "done") is not None) == (ends.pop(key, None) is not None)
        elif operation == "t":
            clock.now += number
        elif operation == "s":
            expired = {k for k, end in ends.items() if end <= clock.now}
            assert set(book.sweep()) == expired
            ends = {k: end for k, end in ends.items() if k not in expired}
        assert set(book.open_identities()) == ends.keys()


async def test_the_book_wakes_a_pull_that_came_before_its_prefill() -> None:
    book = OfferBook(30.0, time.monotonic)
    waiting = asyncio.create_task(book.wait(KEY, 0, 5.0))
    await asyncio.sleep(0)
    assert book.num_waiting == 1 and book.open(KEY, nothing)
    await turns()
    assert not waiting.done(), "opened, but nothing is computed yet"
    book.advance(KEY, ComputedTokens(30, (1,), (1,)))
    entry = await waiting
    assert entry is not None and entry.computed.num_tokens == 30 and book.num_waiting == 0
    assert await book.wait(KEY, 30, 0.01) is entry
    book.advance(KEY, ComputedTokens(30, (1,), (1,)), Seal(5))
    sealed = await book.wait(KEY, 30, 5.0)
    assert sealed is not None and sealed.seal is not None and sealed.seal.first_token == 5
    assert book.end(KEY, "done") and not book.end(KEY, "again") and not book.open_identities()


async def test_the_book_names_why_a_key_is_not_to_be_had() -> None:
    clock = Clock()
    book = OfferBook(2.0, clock)
    assert await book.wait(KEY, 0, 0.01) is None
    with pytest.raises(HandoverError, match="not offered by this prefill rank"):
        book.get_open(KEY)
    book.open(OTHER, nothing)
    with pytest.raises(HandoverError, match="not offered by this prefill rank"):
        book.get_open(KEY)
    waiting = asyncio.create_task(book.wait(OTHER, 0, 5.0))
    await asyncio.sleep(0)
    clock.now += 2
    assert list(book.sweep()) == [OTHER]
    with pytest.raises(HandoverError, match="the lease of 2.0 s expired"):
        await waiting
    with pytest.raises(HandoverError, match="expired"):
        book.renew(OTHER)
    assert not book.open_identities() and book.num_waiting == 0


@pytest.mark.parametrize(("lease_s", "known_s"), [(2.0, ENDED_KEEP_S), (300.0, 1200.0)])
async def test_a_release_that_comes_first_keeps_the_key_shut(
    lease_s: float, known_s: float
) -> None:
    """A release that precedes its offer keeps the key closed for the longer of ENDED_KEEP_S and
    four leases."""
    clock = Clock()
    book = OfferBook(lease_s, clock)
    assert not book.end(KEY, "cancelled")
    clock.now += known_s
    book.sweep()
    assert not book.open(KEY, nothing) and not book.open_identities()
    clock.now += 10_000
    book.sweep()
    assert book.open(KEY, nothing), "ended keys are not remembered for ever"
    book.end(KEY, "done")


async def test_a_page_keeps_the_generation_it_came_with() -> None:
    """The page's next owner gives it another generation, which must not pass as the offered one."""
    book = OfferBook(30.0, time.monotonic)
    book.open(KEY, nothing)
    book.advance(KEY, ComputedTokens(4, (1,), (1,)))
    with pytest.raises(AssertionError, match="offered pages were replaced"):
        book.advance(KEY, ComputedTokens(9, (2, 1), (5, 3)))
    book.advance(KEY, ComputedTokens(8, (1, 2), (3, 5)), Seal(7))
    entry = book.get_open(KEY)
    assert entry.computed.generations == (1, 5)
    assert entry.seal is not None and entry.seal.generations == (3, 5), "as they are now"
    with pytest.raises(AssertionError, match="was already sealed"):
        book.advance(KEY, ComputedTokens(8, (1, 2), (3, 5)), Seal(7))
    book.end(KEY, "done")
