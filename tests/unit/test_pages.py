import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness import tiny
from tandem.core.config import load as load_config
from tandem.core.errors import StalePages
from tandem.core.info import DECODE
from tandem.core.pages import DUMMY_PAGE
from tandem.kv_transfer.budget import default_num_pages
from tandem.kv_transfer.pages import PagePool
from tandem.model.loaded import load_model


def test_allocation_is_all_or_nothing_and_never_gives_the_dummy_page() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    with pytest.raises(AssertionError, match="need 5 pages, but 4 are free"):
        pool.allocate(5)
    assert pool.num_free == 4
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4] and DUMMY_PAGE not in pages
    pool.release(pages)
    pool.check_integrity()
    assert pool.num_free == 4


def test_num_pages_for_rounds_up() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    assert [pool.num_pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_page_that_changed_hands_is_stale() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    pages = pool.allocate(1)
    noted = pool.generations(pages)
    pool.retain(pages)
    pool.release(pages)
    pool.check_generations(pages, noted)
    pool.release(pages)
    with pytest.raises(
        StalePages, match=f"page 1 was freed: its generation changed from {noted[0]}"
    ):
        pool.check_generations(pages, noted)
    assert pool.allocate(1) == pages
    with pytest.raises(StalePages):
        pool.check_generations(pages, noted)


@pytest.mark.parametrize("misuse", ["release", "retain"])
def test_using_a_free_page_asserts(misuse: str) -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="freed twice|cannot be retained"):
        getattr(pool, misuse)(pages)


def test_integrity_check_sees_damage() -> None:
    pool = PagePool(num_pages=4, page_size=1)
    pages = pool.allocate(2)
    pool._free.append(pages[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (4, 0)])
def test_impossible_sizes_are_the_users_mistake(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="kv\\.(num_pages|page_size)"):
        PagePool(num_pages, page_size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("are"), st.integers(0, 9)), max_size=60))
def test_random_use_never_breaks_integrity(operations: list[tuple[str, int]]) -> None:
    pool = PagePool(num_pages=12, page_size=2)
    held: list[list[int]] = []
    noted: list[tuple[int, ...]] = []
    for operation, number in operations:
        if operation == "a":
            if number > pool.num_free:
                with pytest.raises(AssertionError):
                    pool.allocate(number)
            else:
                held.append(pool.allocate(number))
                noted.append(pool.generations(held[-1]))
        elif held:
            index = number % len(held)
            if operation == "e":
                pool.retain(held[index])
                held.append(held[index])
                noted.append(noted[index])
            else:
                pool.release(held.pop(index))
                noted.pop(index)
        pool.check_integrity()
        assert pool.num_pages - 1 - pool.num_free == len({page for pages in held for page in pages})
        for pages, generations in zip(held, noted, strict=True):
            pool.check_generations(pages, generations)
    for pages in held:
        pool.release(pages)
    pool.check_integrity()
    assert pool.num_free == 11


def test_bookkeeping_imports_without_torch() -> None:
    modules = ("pages", "layout", "offer_book", "messages")
    listed = ", ".join(f"tandem.kv_transfer.{name}" for name in modules)
    code = f"import sys; import {listed}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pages_fill_a_gpu_but_for_what_steps_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_tiny(tmp_path, seed=3)
    config = load_config(None, [f"model.path={tmp_path}", "kv.page_size=8"])
    loaded = load_model(config, DECODE)
    page = sum(cache.nbytes for group in loaded.allocate_caches(1, 8).values() for cache in group)
    bounds = torch.device("cuda"), loaded.max_model_len, loaded.bytes_per_token
    least = -(-(loaded.max_model_len + 8) // 8) + 1
    memory = [int((least + 0.5) * page) + 10**6, 10**7]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(memory))
    assert default_num_pages(config, *bounds) == least
    memory[0] -= page
    with pytest.raises(
        ValueError, match="model.max_model_len: .* do not fit on .* has 0.0 GB free"
    ):
        default_num_pages(config, *bounds)
