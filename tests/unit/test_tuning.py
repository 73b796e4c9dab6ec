"""Training runs of drafters resume where they stopped, and the saved weights are those that
draft."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from benchmarks.harness.engines import load
from tandem.core.config import TINY_MODEL
from tandem.model.drafters.mtp import MtpDrafter
from tandem.model.drafters.mtp_vanilla import VanillaDrafter
from tests.numerics import assert_near, network_rounding
from tests.unit.test_drafts import fresh_rows
from training import medusa2, tuning
from training.evaluate import load_network
from training.medusa import Heads
from training.tuning import TrainingRun, TrainingSetup, chain_losses, draft_optimizers
from training.vanilla import Modules, agreement, chain_drafts, save

TOKENIZER = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


def arguments(state: Path, **more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"num_steps": 6, "state": state, "seed": 3} | more)


def run(state: Path, **more: object) -> TrainingRun:
    """Return a run that trains a small matrix towards the identity."""
    torch.manual_seed(0)
    trained = nn.Linear(8, 8)
    stream = torch.arange(9000) % 8
    texts = TrainingSetup(None, TOKENIZER, stream, stream[:2570].view(10, 257))  # type: ignore[arg-type]

    def losses(windows: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(windows[0, :8] % 8, 8).float()
        return (trained(x) - x).square().mean(1)[:2]

    return TrainingRun(
        trained, losses, draft_optimizers(trained, 1e-2, 1e-2), texts, arguments(state, **more)
    )


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed run reaches the same weights as one that was not interrupted."""
    monkeypatch.setattr(tuning, "SAVE_EVERY", 2)
    whole = run(tmp_path / "whole").run()
    first = run(tmp_path / "parts")
    step = first._step

    def failing() -> list[float]:
        if first.num_done == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(first, "_step", failing)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = run(tmp_path / "parts").run()
    assert second.num_done == 6
    for one, other in zip(whole._trained.parameters(), second._trained.parameters(), strict=True):
        assert torch.equal(one, other)
    assert json.loads((tmp_path / "parts" / "history.json").read_text())["seconds"] > 0
    with pytest.raises(
        ValueError, match="is of a run that was asked for .*another folder, or remove"
    ):
        run(tmp_path / "parts", seed=4).run()


def test_modules_learn_and_draft_what_they_learnt(tmp_path: Path) -> None:
    network = load_network(TINY_MODEL).requires_grad_(False)
    modules = Modules(network, 2)
    windows = torch.randint(5, 250, (2, 65), generator=torch.Generator().manual_seed(2))
    adam = torch.optim.Adam(modules.parameters(), lr=1e-3)
    values = []
    for _ in range(8):
        loss = chain_losses(network, chain_drafts(network, modules), windows)
        values.append(loss.detach().mean())
        loss.mean().backward()
        adam.step()
        adam.zero_grad()
    assert values[-1] < 0.9 * values[0]
    assert not torch.equal(modules.layers[0].eh_proj.weight, modules.layers[1].eh_proj.weight)
    shares, length = agreement(network, modules, windows)
    assert len(shares) == 2 and 1 <= length <= 3
    save(modules, TINY_MODEL, tmp_path)
    loaded = load(tmp_path, "speculation.max_depth=2")
    assert isinstance(loaded.drafter, VanillaDrafter)
    for weight in modules.parameters():
        weight.data = weight.data.bfloat16().float()
    tokens = windows[:1, :21]
    with torch.inference_mode():
        wanted = modules(network, tokens, network(tokens).hidden)
        ids = tokens[0].tolist()
        batch, num_pages = fresh_rows(ids[:-1], 8, 0)
        [hidden] = loaded.network(batch, loaded.allocate_caches(num_pages + 4, 8))
        for i, layer in enumerate(loaded.drafter._layers):
            batch, num_pages = fresh_rows(ids[i + 1 :], 8, 1)
            drafter = MtpDrafter(loaded.network, layer)
            hidden = drafter.forward(
                batch, hidden[: len(ids) - 1 - i], loaded.allocate_caches(num_pages + 4, 8)
            )
            logits = loaded.network.logits(hidden)[: wanted[i].shape[1]]
            size = float(wanted[i].abs().max())
            assert_near(logits, wanted[i][0], network_rounding(10 + i + 1, 192, size))


def test_medusa_2_trains_the_model_and_its_heads_but_not_its_mtp_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.tuning.CONTINUATION_BATCH", 1)
    monkeypatch.setattr("training.tuning.CORPUS_BATCH", (1, 128))
    network = load_network(TINY_MODEL).requires_grad_(False)
    heads, windows = Heads(network, 2), torch.randint(5, 250, (16, 257))
    texts = TrainingSetup(network, TOKENIZER, windows.flatten().repeat(9), windows)
    parts = {"trunk": network.model.layers[4], "mtp": network.mtp, "heads": heads}
    before = {name: [w.clone() for w in part.parameters()] for name, part in parts.items()}
    asked = arguments(tmp_path, num_warm_steps=1, num_steps=1, lr=1e-2)
    assert medusa2.run(heads, texts, asked) > 0
    kept = {
        name: all(map(torch.equal, before[name], part.parameters())) for name, part in parts.items()
    }
    assert kept == {"trunk": False, "mtp": True, "heads": False}
