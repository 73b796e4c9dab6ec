"""Error of the shipped checkpoint's logits in bf16, for each way of computing them. One stale cache
entry causes a larger error.

Shape legend: T tokens, V vocabulary.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness.engines import load
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.model.kernels.recorded import Recorded
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, Segment, pack_segments
from tandem.model.network.cache import MAIN, Caches
from tests.often import often

PAGE_SIZE, NUM_PROMPT, NUM_ALL = 16, 48, 96
BOUND = 0.012
"""Bound on the RMS error of bf16 logits at the median place, divided by their standard deviation.
The median is used because rounding may choose another expert where two are nearly tied."""


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return held_out(1, NUM_ALL, NUM_ALL, seed=9)[0]


def caches_of(loaded: LoadedModel) -> tuple[Caches, list[int]]:
    pages = list(range(1, 1 + NUM_ALL // PAGE_SIZE))
    return loaded.allocate_caches(len(pages) + 1, PAGE_SIZE), pages


def prompt_logits(loaded: LoadedModel, ids: list[int], chunk: int) -> Tensor:
    """Return the logits [T, V] of packed chunks, computed as in prefill."""
    caches, pages = caches_of(loaded)
    found = []
    for lo in range(0, len(ids), chunk):
        batch = pack_segments([Segment(ids[lo : lo + chunk], lo, pages)], PAGE_SIZE, loaded.device)
        found.append(loaded.network.logits(loaded.network(batch, caches))[0])
    return torch.cat(found)


def text_logits(
    loaded: LoadedModel, ids: list[int], width: int, recorded: bool, stale: int | None = None
) -> Tensor:
    """Return the logits [T, V] of the places after the prompt, ``width`` at a time, computed as in
    decode. If ``stale`` is given, the entry of that slot is replaced by an older one."""
    caches, pages = caches_of(loaded)
    prompt = pack_segments([Segment(ids[:NUM_PROMPT], 0, pages)], PAGE_SIZE, loaded.device)
    loaded.network(prompt, caches)

    table_1P = torch.tensor([pages])

    def step(ids_1Q: Tensor, slots_1Q: Tensor, places_1Q: Tensor) -> tuple[Tensor]:
        batch = Batch(ids_1Q, slots_1Q, places_1Q, slots_1Q + 1, table_1P)
        return (loaded.network.logits(loaded.network(batch, caches)),)

    run, found = Recorded(step) if recorded else step, []
    for lo in range(NUM_PROMPT, len(ids), width):
        if stale is not None and lo > stale:
            for cache in caches[MAIN]:
                flat = cache.flatten(0, 1)
                flat[PAGE_SIZE + stale] = flat[PAGE_SIZE + stale - 9]
        slots = torch.arange(lo, lo + width)[None]
        [logits] = run(torch.tensor([ids[lo : lo + width]]), slots, PAGE_SIZE + slots)
        found.append(logits[0])
    return torch.cat(found)


def error(got_TV: Tensor, wanted_TV: Tensor) -> float:
    """Return the relative RMS error of the median place."""
    return float(((got_TV - wanted_TV).square().mean(-1).sqrt() / wanted_TV.std(-1)).median())


@torch.inference_mode()
@pytest.mark.parametrize("kernels", often(["native", "torch"], ["native"]))
def test_bf16_logits_keep_a_bound_that_a_stale_entry_breaks(kernels: str, ids: list[int]) -> None:
    exact = load(Path(TINY_MODEL), "model.kernels=torch", "model.dtype=float32")
    rounded = load(Path(TINY_MODEL), f"model.kernels={kernels}", "model.dtype=bfloat16")
    wanted_TV = prompt_logits(exact, ids, NUM_ALL)
    seen = {chunk: prompt_logits(rounded, ids, chunk) for chunk in (NUM_ALL, 32)}
    if kernels == "native":
        assert torch.equal(*seen.values()), "chunks change no bit"
    for got_TV in seen.values():
        assert error(got_TV, wanted_TV) < BOUND
    for width in (1, 4):
        for recorded in {False, kernels == "native"}:
            got_TV = text_logits(rounded, ids, width, recorded)
            assert error(got_TV, wanted_TV[NUM_PROMPT:]) < BOUND
    for stale in (NUM_PROMPT + 3, NUM_PROMPT + 12):
        got_TV = text_logits(rounded, ids, 1, recorded=False, stale=stale)
        assert error(got_TV[stale + 1 - NUM_PROMPT :], wanted_TV[stale + 1 :]) > BOUND
