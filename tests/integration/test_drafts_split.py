"""What is drafted is the same split and colocated, to the token in every step: nothing is missing
from a hand-over. And pages that others may share stay as they were."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.driven.engines import greedy
from benchmarks.driven.held_out import held_out
from model.loaded import LoadedModel
from prefill_node.prefix_cache import PrefixCache
from tests import rig as rigs
from tests.rig import rig
from tests.small import write_small
from tests.unit.test_drafts import Spy

SETS = ("kv.num_pages=300", "kv.page_size=4", "speculation.draft_length=fixed")
PROMPTS = held_out(6, 5, 60, seed=8)


@pytest.fixture(scope="module")
def modules_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    write_small(folder, 3)
    return folder


class Heard(Spy):
    """The drafts of real rows alone, by the last token that each has."""

    def draft(self, own: Any, view: Any, *rest: Any) -> Any:
        drafts = self.inner.draft(own, view, *rest)  # type: ignore[attr-defined]
        if view.real_B.any():
            self.drafts += drafts.tokens_BN[view.real_B].tolist()
        return drafts


async def drafted(
    path: Path, monkeypatch: pytest.MonkeyPatch, *sets: str
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Answers to one prompt after the other, and what was drafted for each."""
    spies: list[Heard] = []
    load_once = rigs.load_once

    def spied(*given: Any) -> LoadedModel:
        loaded = load_once(*given)
        spies.append(Heard(loaded.drafter))
        return replace(loaded, drafter=spies[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(rigs, "load_once", spied)
    answers, drafts = [], []
    async with rig(path, *SETS, *sets) as cluster:
        for i, ids in enumerate(PROMPTS):
            tokens, _, _ = await cluster.complete(greedy(f"r{i}", ids, 24, ignore_eos=True))
            answers.append(tokens)
            drafts.append([one for spy in spies for one in spy.drafts])
            for spy in spies:
                spy.drafts.clear()
        await cluster.check_empty()
    monkeypatch.setattr(rigs, "load_once", load_once)
    return answers, drafts


@pytest.mark.parametrize("max_batch_tokens", [5, 2048])
async def test_the_drafts_of_every_step(
    modules_model: Path, monkeypatch: pytest.MonkeyPatch, max_batch_tokens: int
) -> None:
    chunks = f"prefill.max_batch_tokens={max_batch_tokens}"
    split = await drafted(modules_model, monkeypatch, chunks)
    colocated = await drafted(modules_model, monkeypatch, "mode=colocated", chunks)
    assert split == colocated
    assert all(len(steps) > 5 for steps in split[1])


async def test_pages_that_may_be_shared_stay_as_they_were(
    modules_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: dict[int, list[Tensor]] = {}
    publish = PrefixCache.publish

    def told(self: PrefixCache, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        publish(self, token_ids, pages)
        for page in self._pages.values():
            published.setdefault(page, [cache[page].clone() for cache in caches])

    monkeypatch.setattr(PrefixCache, "publish", told)
    async with rig(modules_model, *SETS, "mode=colocated") as cluster:
        [decode] = cluster.decodes
        caches = [one for group in decode._parts.caches.values() for one in group]
        [text] = held_out(1, 20, 20, seed=9)
        for num in range(8, 17):
            await cluster.complete(greedy(f"r{num}", text[:num], 12, ignore_eos=True))
        await cluster.check_empty()
        assert len(published) > 3
        for page, before in published.items():
            for cache, old in zip(caches, before, strict=True):
                assert cache[page].equal(old)
