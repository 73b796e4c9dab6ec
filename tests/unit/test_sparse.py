"""Self-speculation over a part of the KV pages. Drafts equal those of transformers with the other
pages masked. If all pages are read, every draft equals the model's own token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import load as load_config
from tandem.model.loaded import LoadedModel
from tests.unit.test_drafts import Spy, prompt

PAGE_SIZE, NUM_DRAFTS, NUM_TOKENS = 4, 3, 30
SELF = "speculation.drafter=self", f"speculation.max_depth={NUM_DRAFTS}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    tiny.write_tiny(folder, seed=29, num_nextn_predict_layers=0)
    return folder


def loaded_with(folder: Path, budget: int, *sets: str) -> LoadedModel:
    asked = *SELF, f"speculation.draft_budget_pages={budget}", f"kv.page_size={PAGE_SIZE}"
    return load(folder, *asked, "model.kernels=native", *sets)


@torch.no_grad()
def masked_drafts(folder: Path, known: Sequence[int], budget: int) -> list[int]:
    """Draft with transformers. Tokens before the last known one see everything before them. That
    token and the drafts see the first page and ``budget - 1`` pages up to the last draft's."""
    model, drafts = tiny.reference(folder), list[int]()
    num_before, last_page = len(known) - 1, (len(known) - 2 + NUM_DRAFTS) // PAGE_SIZE
    for _ in range(NUM_DRAFTS):
        ids = torch.tensor([[*known, *drafts]])
        slot_T = torch.arange(ids.shape[1])
        page_T = slot_T // PAGE_SIZE
        is_kept_T = (page_T == 0) | (page_T > last_page - (budget - 1))
        sees_TT = slot_T <= slot_T.unsqueeze(1)
        sees_TT = sees_TT & ((slot_T.unsqueeze(1) < num_before) | is_kept_T)
        mask = torch.zeros(sees_TT.shape).masked_fill(~sees_TT, torch.finfo(torch.float32).min)
        logits_V = model(ids, attention_mask=mask[None, None]).logits[0, -1]
        drafts.append(int(logits_V.argmax()))
    return drafts


@pytest.mark.parametrize(("budget", "length"), [(3, 41), (4, 64), (5, 7)])
def test_drafts_are_dense_ones_with_the_other_pages_masked(
    folder: Path, budget: int, length: int
) -> None:
    """Covers texts that are longer than the budget, and texts whose pages are all read."""
    spy = Spy((loaded := loaded_with(folder, budget)).drafter)
    bench = Bench(replace(loaded, drafter=spy), num_drafts=NUM_DRAFTS, page_size=PAGE_SIZE)
    ids = prompt(length)
    first, _ = bench.start(greedy("r", ids, NUM_TOKENS, ignore_eos=True))
    known, cut, num_steps = [*ids, first], 0, 0
    while bench.decode.has_work():
        bench.decode.step()
        expected = masked_drafts(folder, known, budget)
        assert spy.drafts[-1][0] == expected, len(known)
        cut += expected != masked_drafts(folder, known, 1000)
        known += bench.frames[-1].updates[0].token_ids
        num_steps += 1
    assert num_steps > 5 and (cut > 3 or length < 10), "pages that are left out are no matter"
    bench.check_empty()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_over_all_pages_every_draft_is_accepted(folder: Path, dtype: str) -> None:
    loaded = loaded_with(folder, 30, f"model.dtype={dtype}")
    bench = Bench(loaded, num_drafts=NUM_DRAFTS, page_size=PAGE_SIZE, max_rows=6, num_pages=300)
    asked = [
        greedy(f"r{i}", prompt(5 + 9 * i, seed=i), NUM_TOKENS, ignore_eos=True) for i in range(6)
    ]
    for one in asked:
        bench.start(one)
    while bench.decode.has_work():
        bench.decode.step()
    ends = [update.counts for update in bench.updates() if update.counts is not None]
    # An answer may end amid accepted drafts, which then do not count as accepted.
    assert len(ends) == 6 and all(one.num_steps == 8 for one in ends)
    assert all(one.num_accepted >= 7 * NUM_DRAFTS for one in ends)
    bench.check_empty()


def test_wrong_budgets_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="speculation.draft_budget_pages=0: .* 3"):
        load_config(sets=[*SELF, "speculation.draft_budget_pages=0"])
    wrong = (
        r"speculation.draft_budget_pages=33: model.max_model_len=128 needs only 32 "
        r"pages .* at most 32"
    )
    with pytest.raises(ValueError, match=wrong):
        loaded_with(folder, 33, "model.max_model_len=128")
    loaded_with(folder, 32, "model.max_model_len=128")
    with pytest.raises(ValueError, match="speculation.max_tree_nodes=8: self drafts chains"):
        loaded_with(folder, 8, "speculation.max_tree_nodes=8")
