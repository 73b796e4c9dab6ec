"""Drafting with a second model: its drafts equal its own greedy output in transformers. A model
that cannot draft for the checkpoint is rejected."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, IdleFirst, greedy, load
from tandem.core.config import TINY_MODEL
from tandem.model.drafters import mtp_tree
from tandem.model.drafters.draft_model import ModelDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import physical_slots
from tests.conformance import SMALL
from tests.unit.test_drafts import Spy, prompt

VOCAB = {"vocab_size": 2048}
OTHER = {"num_hidden_layers": 3, "hidden_size": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
NAME = "speculation.drafter=draft_model"


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("main"), seed=3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("small"), seed=4, **OTHER)


def written(folder: Path, *, seed: int, **sizes: int) -> Path:
    """Write a random checkpoint with the shipped checkpoint's tokenizer."""
    tiny.write_tiny(folder, seed=seed, num_nextn_predict_layers=0, **VOCAB, **sizes)
    (folder / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    return folder


def loaded_with(main: Path, small: Path, *sets: str) -> LoadedModel:
    return load(main, NAME, f"speculation.draft_model_path={small}", "model.kernels=native", *sets)


def chain_drafts(
    loaded: LoadedModel, ids: Sequence[int], num_drafts: int, num_idle: int, page_size: int = 4
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens known before each step that drafted, and the drafts of the step."""
    spy, told = Spy(loaded.drafter), list[tuple[list[int], list[int]]]()
    bench = Bench(
        replace(loaded, drafter=spy),
        num_drafts=num_drafts,
        page_size=page_size,
        num_pages=800 // page_size,
        length=IdleFirst(num_idle),
    )
    first, _ = bench.start(greedy("r", [*ids], 60, ignore_eos=True))
    known = [*ids, first]
    while bench.decode.has_work():
        bench.decode.step()
        told += [(known, drafts) for [drafts] in spy.drafts if drafts]
        spy.drafts.clear()
        known = known + [*bench.frames[-1].updates[0].token_ids]
    bench.check_empty()
    return told


@pytest.mark.parametrize(("num_drafts", "length", "num_idle"), [(3, 9, 0), (1, 4, 3), (2, 17, 20)])
def test_drafts_are_what_the_draft_model_writes_itself(
    main: Path, small: Path, num_drafts: int, length: int, num_idle: int
) -> None:
    """Drafts start from the prompt's entries, which come with the KV hand-over. They follow
    accepted and rejected drafts, and steps without drafts."""
    told = chain_drafts(loaded_with(main, small), prompt(length), num_drafts, num_idle)
    assert len(told) > 10
    for known, drafts in told:
        assert drafts == tiny.reference_greedy(small, known, num_drafts)


def test_a_model_that_drafts_for_itself_is_always_right(main: Path) -> None:
    [*told] = chain_drafts(loaded_with(main, main), prompt(12), 3, 0)
    lengths = [len(known) for known, _ in told]
    assert all(b - a == 4 for a, b in zip(lengths, lengths[1:], strict=False))


def test_a_tree_has_room_for_all_that_drafting_it_writes(
    main: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting a tree writes more nodes than are verified, one slot further than with MTP. None of
    them lies outside the narrowest page table."""
    tree = "speculation.max_depth=4", "speculation.max_tree_nodes=4", "speculation.top_k=4"
    loaded, spared = loaded_with(main, small, *tree, "model.kernels=torch"), list[int]()

    def noted(page_table_BP: Tensor, slots_BQ: Tensor, **named: Any) -> Tensor:
        spared.append(page_table_BP.shape[1] - 1 - int(slots_BQ.max()))
        return physical_slots(page_table_BP, slots_BQ, **named)

    monkeypatch.setattr(mtp_tree, "physical_slots", noted)
    chain_drafts(loaded, prompt(9), 4, 0, page_size=1)
    assert len(spared) > 10 and min(spared) == 0


def test_its_cache_is_its_own_and_told(main: Path, small: Path) -> None:
    one, other = loaded_with(main, small), loaded_with(main, main)
    [group] = one.drafter.cache_groups
    assert isinstance(one.drafter, ModelDrafter)
    assert (group.num_layers, group.width, group.lag) == (3, 32, 0)
    assert one.drafter.identity != other.drafter.identity


def changed(folder: Path, target: Path, name: str, **changes: object) -> Path:
    """Copy a folder and change values in one of its JSON files."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    said = json.loads((target / name).read_text())
    (target / name).write_text(json.dumps(said | changes))
    return target


def test_what_cannot_draft_is_refused_by_name(main: Path, small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speculation.draft_model_path: is null; name the folder"):
        load(main, NAME)
    (other := tmp_path / "other").mkdir()
    tiny.write_tiny(other, seed=1)
    with pytest.raises(
        ValueError, match="has 96 tokens, the main model's 2048; use .* same tokenizer"
    ):
        loaded_with(main, other)
    said = json.loads((small / "tokenizer.json").read_text())
    added = [*said["added_tokens"], said["added_tokens"][0] | {"id": 2047, "content": "<other>"}]
    other = changed(small, tmp_path / "added", "tokenizer.json", added_tokens=added)
    with pytest.raises(ValueError, match=r"tokenizer.json differs .* in added_tokens; use a draft"):
        loaded_with(main, other)
    other = changed(small, tmp_path / "llama", "config.json", model_type="llama")
    with pytest.raises(ValueError, match=r"speculation.draft_model_path=.*llama'?: .*model_type"):
        loaded_with(main, other)
    (other / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"speculation.draft_model_path=.*config.json: no such file"
    ):
        loaded_with(main, other)


def test_one_that_is_too_narrow_for_kernels_takes_plain_ones(main: Path, tmp_path: Path) -> None:
    narrow = written(tmp_path, seed=4, **OTHER | {"kv_lora_rank": 12, "qk_rope_head_dim": 4})
    wrong = (
        r"speculation.draft_model_path: does not fit the native .* multiples of 16; use "
        r".*kernels=torch"
    )
    with pytest.raises(ValueError, match=wrong):
        loaded_with(main, narrow)
    told = chain_drafts(loaded_with(main, narrow, "model.kernels=torch"), prompt(9), 3, 0)
    assert all(drafts == tiny.reference_greedy(narrow, known, 3) for known, drafts in told)


def test_how_a_tokenizer_pads_is_no_matter(main: Path, small: Path, tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0}
    loaded_with(main, changed(small, tmp_path / "pads", "tokenizer.json", padding=padding))


def test_the_shipped_one_is_small() -> None:
    files = [file for file in SMALL.iterdir() if file.is_file() and not file.is_symlink()]
    assert sum(file.stat().st_size for file in files) < 5e6
