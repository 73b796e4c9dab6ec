"""One flipped bit anywhere between prefill's pages and decode's pages fails the pull."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.core.errors import HandoverError
from tandem.kv_transfer.caches import PagedCaches
from tandem.kv_transfer.checksums import PageChecksums
from tandem.kv_transfer.offer_book import ComputedTokens
from tandem.kv_transfer.pages import PagePool
from tests.integration.handover_peer import DEADLINE_S, Prefill
from tests.integration.handover_world import World, offer, world_over
from tests.loopback import LoopbackChannels
from tests.waiting import PATIENCE_S

NUM_TOKENS = 23


def flip(tensor: torch.Tensor, place: int = 7) -> None:
    tensor.view(torch.uint8).view(-1)[place] ^= 16


def sent(prefill: Prefill, world: World) -> None:
    """Flip a bit in the prefill rank's staging, or on the way."""
    gather = prefill.caches.gather

    def flipping(span: Any, out: torch.Tensor, *more: Any) -> None:
        gather(span, out, *more)
        if span.lo == 0 and span.group.name == "main":
            flip(out)

    prefill.caches.gather = flipping  # type: ignore[method-assign]


def received(prefill: Prefill, world: World) -> None:
    """Flip a bit in the decode rank's staging."""
    scatter = world.decode.caches.scatter

    def flipping(span: Any, staged: torch.Tensor) -> None:
        if span.hi == NUM_TOKENS and span.group.name == "mtp":
            flip(staged, -1)
        scatter(span, staged)

    world.decode.caches.scatter = flipping  # type: ignore[method-assign]


def written(prefill: Prefill, world: World) -> None:
    """Flip a bit in a page of the decode rank."""
    scatter = world.decode.caches.scatter

    def flipping(span: Any, staged: torch.Tensor) -> None:
        scatter(span, staged)
        slot = world.decode.slots(span.pages, 0, 1)[0]
        if span.lo == 0 and span.group.name == "main":
            flip(world.decode.layers()[1][slot])

    world.decode.caches.scatter = flipping  # type: ignore[method-assign]


def read(prefill: Prefill, world: World) -> None:
    """Flip a bit in a page of the prefill rank, after the decode rank has received all of it."""
    handle = world.handler

    async def flipping(epoch: int, method: str, payload: bytes) -> bytes:
        if method == "checksums":
            [pages] = prefill.pages.values()
            flip(prefill.layers()[3][prefill.slots(pages, 0, 1)[0]])
        return await handle(epoch, method, payload)

    world.handler = flipping


@pytest.mark.parametrize("where", [sent, received, written, read])
async def test_a_flipped_bit_ends_the_pull(where: Callable[[Prefill, World], None]) -> None:
    """The opposite case is covered by all hand-over tests, which compare checksums without a
    flip."""
    channel_factory = LoopbackChannels(DEADLINE_S)
    prefill = Prefill(channel_factory, lease_s=PATIENCE_S)
    async with world_over(prefill.handle, channel_factory) as world:
        where(prefill, world)
        await world.prefill(asked := offer(NUM_TOKENS))
        with pytest.raises(HandoverError, match="differs from the prefill rank's"):
            await world.pull(asked)
        await world.check_clean()
    await prefill.source.stop()
    prefill.engine.stop()


@pytest.mark.parametrize("width", [24, 3])
def test_what_lies_in_a_full_page_has_the_sum_of_its_first_hand_over(width: int) -> None:
    """A full page keeps its first checksum, so the next reader finds bits that flipped in between.
    A page of another owner has a different checksum."""
    pool = PagePool(9, page_size=4)
    tensors = [torch.rand(9 * 4, width) for _ in range(2)]
    sums = PageChecksums(PagedCaches({"main": tensors}, pool, "float32", "tiny"))
    pages = tuple(pool.allocate(3))
    now = ComputedTokens(10, pages, pool.generations(pages))
    first = sums.of(now).groups["main"]
    for tensor in tensors:
        for page in pages:
            for slot in range(4 * page, 4 * page + 4):
                flip(tensor[slot], 2)
    second = sums.of(now).groups["main"]
    assert first[:2] == second[:2] and first[2] != second[2]
    assert len({*first, *second}) == 4
    pool.release([pages[0]])
    assert pool.allocate(1) == [pages[0]]
    later = sums.of(ComputedTokens(10, pages, pool.generations(pages))).groups["main"]
    assert later[0] not in first and later[1] == first[1]


def test_layers_that_change_places_are_found() -> None:
    """Opposite changes at the same position of two layers are found as well, because all layers
    have different factors."""
    pool, layers = PagePool(3, page_size=2), [torch.rand(6, 2) for _ in range(2)]
    caches = PagedCaches({"main": layers}, pool, "float32", "tiny")

    def summed() -> tuple[int, ...]:
        return PageChecksums(caches).of(ComputedTokens(4, (1, 2), (0, 0))).groups["main"]

    whole = summed()
    first, second = (layer.clone() for layer in layers)
    layers[0].copy_(second)
    layers[1].copy_(first)
    assert all(a != b for a, b in zip(summed(), whole, strict=True))
    layers[0].copy_(first)
    layers[1].copy_(second)
    assert summed() == whole
    words, more = (layer.view(torch.int64)[2:] for layer in layers)
    words += 8
    more -= 8
    assert all(a != b for a, b in zip(summed(), whole, strict=True))


def test_every_bit_counts() -> None:
    pool, layer = PagePool(3, page_size=2), torch.rand(6, 2)
    caches = PagedCaches({"main": [layer]}, pool, "float32", "tiny")
    word_T = layer.view(torch.int64)[2:5].view(-1)

    def summed() -> tuple[int, ...]:
        return PageChecksums(caches).of(ComputedTokens(3, (1, 2), (0, 0))).groups["main"]

    whole, found = summed(), set()
    for bit in range(64):
        mask = 1 << bit if bit < 63 else -(1 << 63)
        word_T[bit % 3] ^= mask
        found.add(summed())
        word_T[bit % 3] ^= mask
    assert len(found) == 64 and whole not in found
