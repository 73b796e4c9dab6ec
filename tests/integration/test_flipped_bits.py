"""One bit that flips anywhere between prefill's pages and decode's ends the pull."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.errors import HandoverError
from kv_transfer.caches import PagedCaches
from kv_transfer.offered import Computed
from kv_transfer.sums import PageSums
from tests.integration.handover_peer import DEADLINE_S, Prefill, Rank
from tests.integration.handover_world import World, offer, world_over
from tests.loopback import LoopbackChannels
from tests.waiting import until

NUM_TOKENS = 23


def flip(tensor: torch.Tensor, place: int = 7) -> None:
    tensor.view(torch.uint8).view(-1)[place] ^= 16


def sent(prefill: Prefill, world: World) -> None:
    """In P's staging, or on the wire."""
    gather = prefill.caches.gather

    def flipping(span: Any, out: torch.Tensor, *more: Any) -> None:
        gather(span, out, *more)
        if span.lo == 0 and span.group.name == "main":
            flip(out)

    prefill.caches.gather = flipping  # type: ignore[method-assign]


def received(prefill: Prefill, world: World) -> None:
    """In D's staging."""
    scatter = world.decode.caches.scatter

    def flipping(span: Any, staged: torch.Tensor) -> None:
        if span.hi == NUM_TOKENS and span.group.name == "mtp":
            flip(staged, -1)
        scatter(span, staged)

    world.decode.caches.scatter = flipping  # type: ignore[method-assign]


def written(prefill: Prefill, world: World) -> None:
    """In a page of D's."""
    scatter = world.decode.caches.scatter

    def flipping(span: Any, staged: torch.Tensor) -> None:
        scatter(span, staged)
        slot = world.decode.slots(span.pages, 0, 1)[0]
        if span.lo == 0 and span.group.name == "main":
            flip(world.decode.layers()[1][slot])

    world.decode.caches.scatter = flipping  # type: ignore[method-assign]


def read(prefill: Prefill, world: World) -> None:
    """In a page of P's, once D has read it."""


def flip_page(prefill: Prefill) -> None:
    [pages] = prefill.pages.values()
    flip(prefill.layers()[3][prefill.slots(pages, 0, 1)[0]])


@pytest.mark.parametrize("where", [sent, received, written, read])
async def test_a_flipped_bit_ends_the_pull(where: Callable[[Prefill, World], None]) -> None:
    maker = LoopbackChannels(DEADLINE_S)
    prefill = Prefill(maker)
    async with world_over(prefill.handle, maker) as world:
        where(prefill, world)
        asked = offer(NUM_TOKENS)
        await world.prefill(asked, seal=False)
        pulling = asyncio.create_task(world.pull(asked))

        async def has_all() -> bool:
            return pulling.done() or bool((await world.tell("report"))["waiting"])

        await until(has_all)
        assert not pulling.done(), pulling.exception()
        if where is read:
            flip_page(prefill)
        await world.tell(
            "seal", request_id=asked.identity.request_id, attempt=asked.identity.attempt
        )
        with pytest.raises(HandoverError, match="other bits from token"):
            await pulling
        await world.check_clean()
    await prefill.source.stop()
    prefill.engine.stop()


@pytest.mark.parametrize("width", [24, 3])
def test_what_lies_in_a_full_page_has_the_sum_of_when_it_was_computed(width: int) -> None:
    """So that what flips while it lies there is found by who gets it next; another owner's page
    has a sum of its own."""
    rank = Rank("p", page_size=4, num_pages=9)
    try:
        tensors = {"main": [torch.rand(9 * 4, width) for _ in range(2)]}
        caches = PagedCaches(tensors, rank.pool, "float32", "tiny")
        sums = PageSums(caches)
        pages = tuple(rank.pool.allocate(3))
        now = Computed(10, pages, rank.pool.generations(pages))
        first = sums.of(now)
        for layer in tensors["main"]:
            for slot in rank.slots(list(pages), 0, 12):
                flip(layer[slot], 2)
        second = sums.of(now)
        assert first[:2] == second[:2] and first[2] != second[2]
        assert len({*first, *second}) == 4
        rank.pool.release([pages[0]])
        assert rank.pool.allocate(1) == [pages[0]]
        later = Computed(10, pages, rank.pool.generations(pages))
        assert sums.of(later)[0] not in first and sums.of(later)[1] == first[1]
    finally:
        rank.engine.stop()


def test_every_bit_counts() -> None:
    rank = Rank("p", page_size=2, num_pages=3)
    try:
        layer = torch.rand(6, 2)
        caches = PagedCaches({"main": [layer]}, rank.pool, "float32", "tiny")
        now = Computed(3, (1, 2), (0, 0))
        whole = PageSums(caches).of(now)
        found = set()
        for bit in range(64):
            word = layer.view(torch.int64)[2:5].view(-1)
            word[bit % 3] ^= 1 << bit if bit < 63 else -(1 << 63)
            found.add(PageSums(caches).of(now))
            word[bit % 3] ^= 1 << bit if bit < 63 else -(1 << 63)
        assert len(found) == 64 and whole not in found
    finally:
        rank.engine.stop()
