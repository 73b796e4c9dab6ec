"""Engines compared with transformers, on random tiny checkpoints with all norms and biases
randomised.

In fp32, logits, MTP hidden states and first drafts agree, and greedy tokens are equal for n = 0..3.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import tiny
from benchmarks.harness.engines import POISON, Bench, greedy, load
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.loaded import LoadedModel
from tandem.model.network.batch import Batch, Segment, pack_segments, physical_slots
from tandem.model.network.cache import MAIN, MTP
from tests.numerics import assert_near, network_rounding

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "q_lora_null": {"q_lora_rank": None},
    "wide_values": {"qk_nope_head_dim": 8, "v_head_dim": 20},
    "one_group": {"n_group": 1, "topk_group": 1},
    "four_groups": {"n_group": 4, "topk_group": 2},
    "two_dense": {"first_k_dense_replace": 2},
    "yarn": {"rope_scaling": YARN},
    "yarn_mscale": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}},
    "shared_experts": {"n_shared_experts": 3, "num_experts_per_tok": 3},
}
PAGES = [5, 2, 9, 3, 7, 1, 8, 4]
GROWTH = 20
"""Factor by which random norms amplify errors."""


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    seed = 100 + list(VARIANTS).index(request.param)
    tiny.write_tiny(folder, seed=seed, **VARIANTS[request.param])
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 90, (length,), generator=generator).tolist()


def rows(ids: list[int], lo: int, hi: int, page_size: int, *, packed: bool) -> Batch:
    if packed:
        return pack_segments([Segment(ids[lo:hi], lo, PAGES)], page_size, torch.device("cpu"))
    slots = torch.arange(lo, hi).unsqueeze(0)
    table = torch.tensor([PAGES])
    keep = torch.ones_like(slots, dtype=torch.bool)
    return Batch(
        torch.tensor([ids[lo:hi]]),
        slots,
        physical_slots(table, slots, keep, page_size),
        slots + 1,
        table,
    )


def check(loaded: LoadedModel, got: Tensor, reference: Tensor) -> None:
    config, size = loaded.config, float(reference.abs().max())
    num_layers = config.num_hidden_layers + config.num_nextn_predict_layers
    bound = network_rounding(num_layers, config.hidden_size, size, GROWTH)
    assert_near(got, reference, bound)


def test_logits(checkpoint: Path) -> None:
    """Compute packed and absorbed attention, in pieces, over scattered pages with a poisoned dummy
    page."""
    loaded = load(checkpoint)
    caches = loaded.allocate_caches(10, 8)
    for cache in caches[MAIN]:
        cache[0] = POISON
    ids = prompt(40)
    pieces = [(0, 17, True), (17, 20, False), (20, 21, False), (21, 33, True), (33, 40, False)]
    with torch.inference_mode():
        hidden = [
            loaded.network(rows(ids, lo, hi, 8, packed=packed), caches) for lo, hi, packed in pieces
        ]
        logits = loaded.network.logits(torch.cat(hidden, 1))[0]
    reference = tiny.reference_logits(checkpoint, ids)
    check(loaded, logits, reference)


def test_mtp_hidden_and_first_draft(checkpoint: Path) -> None:
    """Compare the drafter's rows with transformers' own MTP path, packed and absorbed."""
    loaded = load(checkpoint)
    assert isinstance(loaded.drafter, MtpDrafter)
    ids = prompt(30, seed=1)
    reference_hidden, reference_logits = tiny.reference_mtp(checkpoint, ids)
    for packed in (True, False):
        caches = loaded.allocate_caches(10, 8)
        with torch.inference_mode():
            hidden = loaded.network(rows(ids, 0, len(ids), 8, packed=True), caches)
            batch = rows(ids[1:], 0, len(ids) - 1, 8, packed=packed)
            batch = replace(batch, positions_BQ=batch.positions_BQ + 1)
            mtp = loaded.drafter.forward(batch, hidden[0, :-1], caches)
            logits = loaded.network.logits(mtp)
        num = len(ids) - 1
        check(loaded, mtp, reference_hidden[:num])
        assert logits.argmax(-1).tolist() == reference_logits[:num].argmax(-1).tolist()


@pytest.mark.parametrize(
    "num_drafts",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_greedy_tokens(checkpoint: Path, num_drafts: int) -> None:
    """Uses a batch of different lengths, chunked prefill, all draft limits up to the engine's, and
    both kinds of first step."""
    loaded = load(checkpoint)
    prompts = [prompt(length, seed=length) for length in (1, 2, 7, 23)]
    asked = [
        greedy(f"r{i} {limit}", ids, 24, max_drafts=limit, ignore_eos=True)
        for i, ids in enumerate(prompts)
        for limit in range(min(1, num_drafts), num_drafts + 1)
    ]
    for handover_hidden in (True, False) if num_drafts else (True,):
        bench = Bench(
            loaded,
            num_drafts=num_drafts,
            handover_hidden=handover_hidden,
            max_batch_tokens=6,
            max_rows=len(asked),
        )
        for request, (tokens, reason) in zip(asked, bench.generate(*asked), strict=True):
            assert reason == "length" and len(tokens) == 24
            assert tokens == reference_argmax(checkpoint, request.prompt_ids, tuple(tokens))
        bench.check_empty()


@lru_cache
def reference_argmax(checkpoint: Path, ids: tuple[int, ...], tokens: tuple[int, ...]) -> list[int]:
    """Return the most likely token after each prefix of ``tokens``, in one pass. If the result
    equals ``tokens``, it is the greedy answer."""
    logits = tiny.reference_logits(checkpoint, [*ids, *tokens[:-1]])
    return logits[len(ids) - 1 :].argmax(-1).tolist()


def test_a_checkpoint_without_its_mtp_layer_is_served_plainly(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, seed=7, num_mtp_layers=0)
    loaded = load(tmp_path)
    assert not loaded.has_mtp and loaded.drafter.name == "none"
    assert MTP not in [group.name for group in loaded.cache_groups]
    bench = Bench(loaded)
    ids = prompt(9)
    [(tokens, _)] = bench.generate(greedy("r", ids, 12, ignore_eos=True))
    assert tokens == tiny.reference_greedy(tmp_path, ids, 12)
    with pytest.raises(ValueError, match=r"speculation\.drafter.*lacks"):
        load(tmp_path, "speculation.drafter=mtp")
