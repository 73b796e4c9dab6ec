"""A split cluster drafts the same tokens as a colocated one in every step.

So a hand-over misses nothing that drafters need. Pages that may be shared stay unchanged.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.drafters.costs import bytes_of
from benchmarks.harness.engines import greedy
from benchmarks.harness.held_out import held_out
from tandem.core.config import TINY_MODEL
from tandem.decode_node.service.rank import DecodeRank
from tandem.kv_transfer.messages import Seal
from tandem.model.loaded import LoadedModel
from tandem.prefill_node.prefix_cache import PrefixCache
from tests import rig as rigs
from tests.conformance import DRAFTERS as EAGLES
from tests.often import often
from tests.rig import rig
from tests.small import write_small
from tests.unit.test_drafts import Spy

SETS = ("kv.num_pages=300", "kv.page_size=4", "speculation.draft_length=fixed")


@cache
def prompts() -> list[list[int]]:
    return held_out(6, 5, 60, seed=8)


@pytest.fixture(scope="module")
def modules_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    write_small(folder, 3)
    return folder


class Heard(Spy):
    """Records the drafts of real rows only, found by the last token of each row."""

    def draft(self, state: Any, context: Any, **rest: Any) -> Any:
        drafts = self.inner.draft(state, context, **rest)  # type: ignore[attr-defined]
        if context.real_B.any():
            self.drafts += drafts.tokens_BN[context.real_B].tolist()
        return drafts


async def drafted(
    path: Path, monkeypatch: pytest.MonkeyPatch, *sets: str
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return the answers to prompts sent one after another, and the drafts made for each."""
    spies: list[Heard] = []
    load_once = rigs.load_once

    def spied(**options: Any) -> LoadedModel:
        loaded = load_once(**options)
        spies.append(Heard(loaded.drafter))
        return replace(loaded, drafter=spies[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(rigs, "load_once", spied)
    answers, drafts = [], []
    async with rig(path, *SETS, *sets) as cluster:
        for i, ids in enumerate(prompts()):
            tokens, _, _ = await cluster.complete(greedy(f"r{i}", ids, 32, ignore_eos=True))
            answers.append(tokens)
            drafts.append([one for spy in spies for one in spy.drafts])
            for spy in spies:
                spy.drafts.clear()
        await cluster.check_empty()
    monkeypatch.setattr(rigs, "load_once", load_once)
    return answers, drafts


DRAFTERS: dict[str, tuple[str, ...]] = {
    "mtp": (f"model.path={TINY_MODEL}",),
    "vanilla": (),
    "eagle": (f"model.path={TINY_MODEL}", *EAGLES["eagle"]),
    "eagle tree": (f"model.path={TINY_MODEL}", *EAGLES["eagle tree"]),
    "eagle3": (f"model.path={TINY_MODEL}", *EAGLES["eagle3"]),
}


@pytest.mark.parametrize(
    "max_batch_tokens", [5, pytest.param(2048, marks=pytest.mark.slow)], ids=["chunks", "whole"]
)
@pytest.mark.parametrize("name", often(DRAFTERS, ["mtp", "vanilla", "eagle tree"]))
async def test_the_drafts_of_every_step(
    modules_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, max_batch_tokens: int
) -> None:
    sets = (
        f"prefill.max_num_batched_tokens={max_batch_tokens}",
        *DRAFTERS[name],
        "model.kernels=native",
    )
    split = await drafted(modules_model, monkeypatch, *sets)
    colocated = await drafted(modules_model, monkeypatch, "mode=colocated", *sets)
    assert split == colocated
    assert all(len(steps) > 5 for steps in split[1])


async def test_pages_that_may_be_shared_stay_as_they_were(
    modules_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: dict[int, list[Tensor]] = {}
    publish = PrefixCache.insert

    def told(self: PrefixCache, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        publish(self, token_ids, pages)
        for page in self._pages.values():
            published.setdefault(page, [cache[page].clone() for cache in caches])

    monkeypatch.setattr(PrefixCache, "insert", told)
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


async def test_bytes_are_those_that_the_page_says(
    modules_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the page's bytes of caches with the transfer, of features with the seal, and of
    weights with the loaded file."""
    seals: list[Seal] = []
    activate = DecodeRank._activate

    def told(self: DecodeRank, asked: Any, seal: Seal) -> None:
        seals.append(seal)
        activate(self, asked, seal)

    monkeypatch.setattr(DecodeRank, "_activate", told)
    async with rig(modules_model, *SETS) as cluster:
        [decode] = cluster.decodes
        loaded = decode._parts.loaded
        said, config = bytes_of(loaded), loaded.config
        _, _, finished = await cluster.complete(greedy("r", prompts()[0], 5, ignore_eos=True))
        await cluster.check_empty()
    main = 4 * config.num_hidden_layers * config.latent_dim
    assert said["cache_per_token"] == 4 * 3 * config.latent_dim
    assert finished.kv_transfer.bytes == len(prompts()[0]) * (main + said["cache_per_token"])
    seal = seals[-1]  # the warm-up's seal comes first
    assert (
        seal.features is not None
        and len(seal.features) == said["features"] == 4 * 3 * config.hidden_size
    )
    tensors = load_file(modules_model / "model.safetensors")
    first = f"model.layers.{config.num_hidden_layers}"
    own = [
        one
        for name, one in tensors.items()
        if name.startswith("model.layers.") and name[:14] >= first
    ]
    num = sum(one.numel() for one in own)
    # Attention matrices are kept in both forms, and experts are padded to whole vectors.
    assert num * 4 <= said["weights"] <= 1.6 * num * 4
