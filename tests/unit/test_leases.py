import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import HandoverError
from kv_transfer.leases import LeaseTable
from kv_transfer.messages import Seal
from kv_transfer.offered import OfferBook, Offered

KEY = ("r", 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_expires_once_and_only_when_not_renewed() -> None:
    clock = Clock()
    leases = LeaseTable(30.0, clock)
    leases.grant(KEY)
    clock.now += 29
    assert leases.sweep() == [] and leases.renew(KEY)
    clock.now += 29
    assert leases.sweep() == []
    clock.now += 1
    assert leases.sweep() == [KEY] and leases.sweep() == [] and len(leases) == 0


def test_a_lease_that_ran_out_cannot_be_renewed_before_the_sweep() -> None:
    clock = Clock()
    leases = LeaseTable(1.0, clock)
    leases.grant(KEY)
    clock.now += 1
    assert not leases.renew(KEY) and leases.sweep() == [KEY]


def test_release_is_idempotent_and_grant_is_not() -> None:
    leases = LeaseTable(1.0, Clock())
    leases.grant(KEY)
    with pytest.raises(AssertionError, match="has a lease already"):
        leases.grant(KEY)
    assert leases.release(KEY) and not leases.release(KEY) and KEY not in leases


def test_no_lease_without_a_length() -> None:
    with pytest.raises(ValueError, match="lease_s"):
        LeaseTable(0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("gnrst"), st.integers(0, 4)), max_size=80))
def test_random_use_agrees_with_a_model(operations: list[tuple[str, int]]) -> None:
    clock = Clock()
    leases = LeaseTable(3.0, clock)
    ends: dict[tuple[str, int], float] = {}
    for operation, number in operations:
        key = ("r", number)
        if operation == "g" and key not in ends:
            leases.grant(key)
            ends[key] = clock.now + 3.0
        elif operation == "n":
            alive = ends.get(key, 0.0) > clock.now
            assert leases.renew(key) == alive
            ends.update({key: clock.now + 3.0} if alive else {})
        elif operation == "r":
            assert leases.release(key) == (ends.pop(key, None) is not None)
        elif operation == "t":
            clock.now += number
        elif operation == "s":
            expired = {k for k, end in ends.items() if end <= clock.now}
            assert set(leases.sweep()) == expired
            ends = {k: end for k, end in ends.items() if k not in expired}
        assert leases.keys() == ends.keys()


async def test_the_book_wakes_a_pull_that_came_before_its_prefill() -> None:
    book = OfferBook(2, 30.0)
    waiting = asyncio.create_task(book.wait(KEY, (0, 0), 5.0))
    await asyncio.sleep(0)
    assert book.num_waiting == 1 and book.open(KEY)
    await asyncio.sleep(0.01)
    assert not waiting.done(), "opened, but nothing is computed yet"
    book.advance(KEY, Offered(KEY, (3, 2), (1,), (1,)))
    entry = await waiting
    assert entry is not None and entry.num_tokens == (3, 2) and book.num_waiting == 0
    assert await book.wait(KEY, (3, 2), 0.01) is entry
    book.seal(KEY, lambda e: Seal(5, None, "", e.num_tokens, e.generations))
    sealed = await book.wait(KEY, (3, 2), 5.0)
    assert sealed is not None and sealed.seal is not None and sealed.seal.first_token == 5
    assert book.end(KEY, "done") and not book.end(KEY, "again") and len(book.leases) == 0


async def test_the_book_names_why_a_key_is_not_to_be_had() -> None:
    clock = Clock()
    book = OfferBook(1, 2.0, clock)
    assert await book.wait(KEY, (0,), 0.01) is None
    with pytest.raises(HandoverError, match="not offered here"):
        book.need(KEY)
    book.open(("r", 2))
    with pytest.raises(HandoverError, match="attempt 0 was asked for, 2 is open"):
        book.need(KEY)
    waiting = asyncio.create_task(book.wait(("r", 2), (0,), 5.0))
    await asyncio.sleep(0)
    clock.now += 2
    assert book.sweep() == [("r", 2)]
    with pytest.raises(HandoverError, match="its lease of 2.0 s expired"):
        await waiting
    with pytest.raises(HandoverError, match="expired"):
        book.renew(("r", 2))
    assert book.num_open == 0 and book.num_waiting == 0


async def test_a_release_that_comes_first_keeps_the_key_shut() -> None:
    clock = Clock()
    book = OfferBook(1, 2.0, clock)
    assert not book.end(KEY, "cancelled")
    assert not book.open(KEY) and book.num_open == 0 and len(book.leases) == 0
    clock.now += 10_000
    book.sweep()
    assert book.open(KEY), "ended keys are not remembered for ever"
    book.end(KEY, "done")
