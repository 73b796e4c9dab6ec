"""Staging memory, and copies into and out of it. TRITON_INTERPRET=1 tests the copies on GPUs."""

import asyncio
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv_transfer import caches as caches_module
from tandem.kv_transfer.caches import (
    PagedCaches,
    Span,
    check_chunks,
    split_into_chunks,
    staging_view,
)
from tandem.kv_transfer.layout import Group, Layout
from tandem.kv_transfer.pages import PagePool
from tandem.kv_transfer.staging import StagingPool
from tests.kernels import IS_INTERPRETED, ours
from tests.waiting import PATIENCE_S, turns

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True, params=["by layer"] if IS_INTERPRETED else ["by layer", "native"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        from tandem.kv_transfer.gpu_copies import copy_all_layers

        monkeypatch.setattr(caches_module, "copy_for_device", lambda device: copy_all_layers)
    elif request.param == "native":
        monkeypatch.setattr(caches_module, "copy_for_device", lambda device: ours().copy_rows)


def random_bytes(num_slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = width * dtype.itemsize
    return torch.randint(0, 256, (num_slots, num_bytes), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16])
def test_gather_then_scatter_moves_exactly_the_rows(dtype: torch.dtype, width: int) -> None:
    source = [random_bytes(40, width, dtype) for _ in range(3)]
    target = [random_bytes(24, width, dtype) for _ in range(3)]
    before, sides = [cache.view(torch.uint8).clone() for cache in target], list[PagedCaches]()
    read_T, write_T = torch.tensor([4, 39, 0, 17, 5]), torch.tensor([23, 1, 2, 11, 7])
    out = torch.zeros(3, 5, width * dtype.itemsize, dtype=torch.uint8)
    for cache in (source, target):
        pages_of_one = [layer.view(len(layer), 1, width) for layer in cache]
        sides.append(PagedCaches({"g": pages_of_one}, PagePool(len(cache[0]), 1), "any", "m"))
    group = sides[0].layout.groups[0]
    sides[0].gather(Span(group, read_T.tolist(), 0, 5), out)
    sides[1].scatter(Span(group, write_T.tolist(), 0, 5), out)
    others = torch.ones(24, dtype=torch.bool)
    others[write_T] = False
    for layer in range(3):
        wanted = source[layer].view(torch.uint8)[read_T]
        got = target[layer].view(torch.uint8)
        assert torch.equal(out[layer], wanted)
        assert torch.equal(got[write_T], wanted)
        assert torch.equal(got[others], before[layer][others])


def test_a_chunk_larger_than_a_cache_moves_exactly_its_rows() -> None:
    """Runs of slots start anywhere, also within a word."""
    num_pages = 10 if IS_INTERPRETED else 70
    pool = PagePool(num_pages + 20, 64)
    tensors = {"g": [random_bytes(pool.num_pages * 64, 577, torch.uint8) for _ in range(2)]}
    pages = pool.allocate(num_pages - 4)[::-1] + pool.allocate(4)
    caches = PagedCaches(tensors, pool, "any", "m")
    span = Span(caches.layout.groups[0], pages, 3, num_pages * 64 - 5)
    out = torch.zeros(2, num_pages * 64 - 8, 577, dtype=torch.uint8)
    assert out.nbytes > 2 << 20 or IS_INTERPRETED
    caches.gather(span, out)
    slots_T, before = caches.slots_T(span), [layer.clone() for layer in tensors["g"]]
    for layer, rows_TW in zip(tensors["g"], out, strict=True):
        assert torch.equal(rows_TW, layer[slots_T])
    new = torch.randint_like(out, 256)
    caches.scatter(span, new)
    for layer, old, rows_TW in zip(tensors["g"], before, new, strict=True):
        old[slots_T] = rows_TW
        assert torch.equal(layer, old)


def test_token_wise_copies_between_different_page_sizes() -> None:
    layout = Layout((Group("main", 2, 12), Group("mtp", 1, 12)), "float32", "m")
    sides = []
    for page_size in (4, 3):
        pool = PagePool(16, page_size)
        tensors = {
            group.name: [
                random_bytes(16 * page_size, 3, torch.float32) for _ in range(group.num_layers)
            ]
            for group in layout.groups
        }
        caches = PagedCaches(tensors, pool, "float32", "m")
        assert caches.layout == layout
        sides.append((caches, tensors, pool.allocate(5)[::-1]))
    (source, from_tensors, from_pages), (target, to_tensors, to_pages) = sides
    out = torch.zeros(2, 7, 12, dtype=torch.uint8)
    source.gather(Span(layout.groups[0], from_pages, 2, 9), out)
    target.scatter(Span(layout.groups[0], to_pages, 2, 9), out)
    for token in range(2, 9):
        read = from_pages[token // 4] * 4 + token % 4
        write = to_pages[token // 3] * 3 + token % 3
        for layer in range(2):
            wanted = from_tensors["main"][layer][read].view(torch.uint8)
            assert torch.equal(to_tensors["main"][layer][write].view(torch.uint8), wanted)


@given(st.integers(0, 500), st.integers(0, 300), st.integers(1, 5), st.integers(24, 400))
@settings(max_examples=60, deadline=None)
def test_chunks_cover_the_range_and_fit(lo: int, length: int, layers: int, chunk: int) -> None:
    group = Group("g", layers, 4)
    parts = [
        (part.lo, part.hi) for part in split_into_chunks(Span(group, (), lo, lo + length), chunk)
    ]
    assert [t for a, b in parts for t in range(a, b)] == list(range(lo, lo + length))
    assert all(0 < (b - a) * layers * 4 <= chunk for a, b in parts)


def test_a_chunk_must_hold_a_token() -> None:
    with pytest.raises(
        ValueError, match="chunk_bytes=23: too small for one token; use at least 24"
    ):
        check_chunks(Layout((Group("g", 6, 4),), "float32", "m"), 23)
    with pytest.raises(ValueError, match="staging_bytes"):
        StagingPool(total_bytes=10, chunk_bytes=11)


def test_staged_is_a_view_of_the_buffer() -> None:
    pool = StagingPool(100, 100)
    buffer = pool._free[0]
    buffer.bytes.zero_()
    view = staging_view(Span(Group("g", 2, 4), (), 0, 3), buffer)
    view.fill_(9)
    assert view.shape == (2, 3, 4) and int(buffer.bytes.sum()) == 9 * 24


async def test_buffers_are_handed_out_in_order_of_asking() -> None:
    pool = StagingPool(total_bytes=25, chunk_bytes=10)
    first, second = await pool.reserve(), await pool.reserve()
    order: list[str] = []

    async def take(name: str) -> None:
        buffer = await pool.reserve()
        order.append(name)
        pool.free(buffer)

    waiting = [asyncio.create_task(take(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting) and pool.num_buffers - pool.num_taken == 0
    pool.free(first)
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c"]
    pool.free(second)
    pool.check_integrity()
    assert pool.num_buffers - pool.num_taken == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(second)


async def test_cancelled_waiters_lose_no_buffer() -> None:
    pool = StagingPool(10, 10)
    held = await pool.reserve()
    waiters = [asyncio.create_task(pool.reserve()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    pool.free(held)
    waiters[1].cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    pool.check_integrity()
    assert pool.num_buffers - pool.num_taken == 1 and pool.num_taken == 0
    pool.free(await asyncio.wait_for(pool.reserve(), PATIENCE_S))


async def test_quarantine_ends_with_the_channel() -> None:
    pool = StagingPool(10, 10)
    terminal: Future[None] = Future()
    pool.quarantine(await pool.reserve(), terminal)
    waiting = asyncio.create_task(pool.reserve())
    await turns()
    pool.check_integrity()
    assert not waiting.done() and pool.num_taken == 1
    terminal.set_result(None)
    pool.free(await asyncio.wait_for(waiting, PATIENCE_S))
    pool.check_integrity()
    assert pool.num_buffers - pool.num_taken == 1
