"""Several MTP modules compared with transformers: the drafts of every step, on checkpoints that
draft badly and well."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness import tiny
from benchmarks.harness.engines import POISON, Bench, greedy, load
from tandem.core.identity import Identity
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_vanilla import VanillaDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.cache import MTP
from tests.small import write_small
from tests.unit.test_drafts import Spy, fresh_rows, prompt

NUM_TOKENS = 24
Round = tuple[int, list[int]]
"""Length of a text, and the drafts that follow it."""


@pytest.fixture(
    scope="module",
    params=[(2, False), pytest.param((3, False), marks=pytest.mark.slow), (2, True), (3, True)],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random checkpoint, of which hardly any draft is right, or one that drafts well."""
    num, drafts_well = request.param
    folder = tmp_path_factory.mktemp(f"modules{num}")
    if drafts_well:
        write_small(folder, num)
    else:
        tiny.write_tiny(folder, seed=60 + num, num_nextn_predict_layers=num)
    return folder


@contextmanager
def heard() -> Iterator[list[Round]]:
    """Record the drafts that transformers makes during the block."""
    rounds: list[Round] = []
    theirs = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        found = theirs(self, input_ids, **more)
        num = input_ids.shape[1]
        if found[0].shape[1] > num:
            rounds.append((num, found[0][0, num:].tolist()))
        return found

    with patch.object(MTPCandidateGenerator, "get_candidates", get_candidates):
        yield rounds


@lru_cache
def theirs(folder: Path, ids: tuple[int, ...]) -> tuple[list[int], list[Round]]:
    """Return the tokens and drafts of transformers, which fails for prompts with fewer tokens than
    modules."""
    disable_progress_bar()
    with heard() as rounds, torch.no_grad():
        output = tiny.reference(folder).generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            use_mtp=True,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(ids) :].tolist(), rounds


def ours(bench: Bench, spy: Spy, ids: tuple[int, ...]) -> tuple[list[int], list[Round]]:
    first, _ = bench.start(greedy("r", ids, NUM_TOKENS, ignore_eos=True))
    known, rounds = [*ids, first], []
    while bench.decode.has_work():
        bench.decode.step()
        rounds.append((len(known), spy.drafts[-1][0]))
        known += bench.frames[-1].updates[0].token_ids
    return known[len(ids) :], rounds


@pytest.mark.parametrize("num_answers", [4, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_batch_tokens", [1, pytest.param(3, marks=pytest.mark.slow), 2048])
def test_drafts_of_every_step(checkpoint: Path, max_batch_tokens: int, num_answers: int) -> None:
    """The prompt is handed over after prefill in chunks of different sizes."""
    loaded = load(checkpoint)
    assert isinstance(loaded.drafter, VanillaDrafter)
    num = loaded.config.num_nextn_predict_layers
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=num, max_batch_tokens=max_batch_tokens)
    lengths = []
    for i in range(num_answers):
        ids = (*prompt(num + i % 17, seed=200 + i),)
        expected, expected_rounds = theirs(checkpoint, ids)
        tokens, rounds = ours(bench, spy, ids)
        bench.check_empty()
        assert tokens == expected and abs(len(rounds) - len(expected_rounds)) <= 1
        num_rounds = min(len(rounds), len(expected_rounds))
        assert rounds[:num_rounds] == expected_rounds[:num_rounds]
        lengths.append(len(tokens) / len(rounds))
    print(f"{sum(lengths) / len(lengths):.2f} tokens a step")


def from_scratch(loaded: LoadedModel, tokens: list[int], num_drafts: int) -> list[int]:
    """Draft from the whole history without a cache. Each module runs over the output of the one
    before, the last one over its own."""
    drafter, num_rows = loaded.drafter, len(tokens) - 1
    assert isinstance(drafter, VanillaDrafter)
    layers = [MtpDrafter(loaded.network, layer) for layer in drafter._layers]
    batch, num_pages = fresh_rows(tokens[:-1], 8, 0)
    [hidden] = loaded.network(batch, loaded.allocate_caches(num_pages + 4, 8))
    text, drafts = list(tokens), []
    for i in range(num_drafts):
        number = min(i, len(layers) - 1)
        batch, num_pages = fresh_rows(text[number + 1 :], 8, 1)
        output = layers[number].forward(batch, hidden, loaded.allocate_caches(num_pages + 4, 8))
        drafts.append(int(loaded.network.logits(output[-1:]).argmax()))
        text.append(drafts[-1])
        hidden = torch.cat((hidden, output[-1:])) if i >= len(layers) - 1 else output
        assert len(hidden) >= num_rows
    return drafts


@pytest.mark.parametrize("num_drafts", [2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_drafts_equal_those_from_scratch(checkpoint: Path, num_drafts: int) -> None:
    """Covers any number of modules, also for prompts with fewer tokens than modules."""
    loaded = load(checkpoint, f"speculation.max_depth={num_drafts}")
    spy = Spy(loaded.drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=num_drafts)
    for num in (1, 2, 3, 13):
        ids = (*prompt(num, seed=num),)
        tokens, rounds = ours(bench, spy, ids)
        with torch.inference_mode():
            for known, drafts in rounds:
                text = [*ids, *tokens][:known]
                assert drafts == from_scratch(loaded, text, num_drafts), (num, known)


def entries(loaded: LoadedModel, max_batch_tokens: int, ids: list[int]) -> list[torch.Tensor]:
    """Return the entries of each module that prefill writes for a prompt and the places after it.
    No pages of an earlier prompt are reused."""
    bench = Bench(loaded, max_batch_tokens=max_batch_tokens)
    bench.prefill.scheduler.admit(Identity("p"), greedy("p", ids, 1))
    [sequence] = bench.prefill.scheduler.sequences.values()
    for cache in bench.caches[MTP]:
        cache.fill_(POISON)
    while bench.prefill.has_work():
        bench.prefill.step()
    return [cache[sequence.pages].flatten(0, 1) for cache in bench.caches[MTP]]


@pytest.mark.parametrize("max_batch_tokens", [1, 4, 2048])
@pytest.mark.parametrize("num", [1, 2, 12])
def test_prefill_writes_what_follows_from_known_tokens(
    checkpoint: Path, max_batch_tokens: int, num: int
) -> None:
    """Entries that depend on drafts are not written. Native kernels give the same bits in any
    chunk."""
    loaded = load(checkpoint, "model.kernels=native")
    ids = prompt(num, seed=5)
    [first] = Bench(loaded).start(greedy("r", ids, 9))[:1]
    for k, (found, longer) in enumerate(
        zip(
            entries(loaded, max_batch_tokens, ids),
            entries(loaded, max_batch_tokens, [*ids, first, *prompt(5, seed=6)]),
            strict=True,
        ),
        start=1,
    ):
        known = max(0, num + 1 - k)
        assert torch.equal(found[:known], longer[:known])
        assert (found[known:] == POISON).all()


def test_what_prefill_wrote_is_never_written_again(checkpoint: Path) -> None:
    """The first decode step does not write these entries either, because the page may be shared.
    Covers hand-over with and without hidden states."""
    loaded = load(checkpoint)
    num_modules = loaded.config.num_nextn_predict_layers
    for handover_hidden in (True, False):
        bench = Bench(loaded, num_drafts=num_modules, handover_hidden=handover_hidden)
        bench.start(greedy("r", prompt(21, seed=9), 12, ignore_eos=True))
        pages = bench.sequence("r").pages
        before = [cache[pages].flatten(0, 1).clone() for cache in bench.caches[MTP]]
        for _ in range(5):
            bench.decode.step()
        for k, (cache, old) in enumerate(zip(bench.caches[MTP], before, strict=True), start=1):
            new = cache[pages].flatten(0, 1)
            assert torch.equal(new[: 22 - k], old[: 22 - k])
            assert not (new[22 - k] == old[22 - k]).all()


def test_placement_counts_all_modules() -> None:
    """All modules count, however many are loaded, so that balancing does not depend on it."""
    config = ModelConfig.from_dict(tiny.BASE | {"num_nextn_predict_layers": 3})
    num_main = tiny.BASE["num_hidden_layers"] - tiny.BASE["first_k_dense_replace"]
    assert config.num_moe_layers == num_main + 3
    first = config.num_hidden_layers
    assert [config.moe_layer(first + i) for i in range(3)] == [num_main + i for i in range(3)]


def test_fewer_modules_than_promised_are_refused(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, seed=3, num_nextn_predict_layers=3, num_mtp_layers=2)
    with pytest.raises(ValueError, match=r"config.json: num_nextn_predict_layers = 3, .* to 2"):
        load(tmp_path)


def test_no_more_modules_are_loaded_than_drafts_are_asked_for(checkpoint: Path) -> None:
    loaded = load(checkpoint, "speculation.max_depth=1")
    assert [group.num_layers for group in loaded.drafter.cache_groups] == [1] and loaded.lag == 1
    loaded = load(checkpoint, "speculation.max_tree_nodes=4")
    assert [group.num_layers for group in loaded.drafter.cache_groups] == [1], "trees are of one"
