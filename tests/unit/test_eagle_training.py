"""Heads in training compute the same as heads that draft, by their authors' tables. Losses equal
the authors' losses of the same tensors, or the paper's formula."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.core.config import TINY_MODEL
from tandem.model.drafters.eagle import EagleDrafter
from tests.conformance import loaded_head
from tests.eagle_tables import DATA, NUM_ROWS, NUM_STEPS
from tests.eagles import head_rounding, head_tensors, told
from tests.numerics import NUM_LANES, assert_near, network_rounding, rounding
from tests.often import often
from training.eagle import (
    TOKEN_WEIGHT,
    agreement,
    feature_loss,
    head_losses,
    read,
    save,
    taps,
    token_loss,
    top_loss,
)
from training.eagle_network import Head, HeadConfig
from training.evaluate import load_network
from training.model import Network
from training.network import NetworkConfig

OF_TABLES = {"intermediate_size": 40, "rms_norm_eps": 1e-5, "draft_vocab_size": 40}


def table_head(kind: str) -> tuple[Head, Network]:
    """Return a head with the table's weights, over a network with its embedding."""
    network = Network(
        NetworkConfig(vocab_size=96, hidden_size=48, num_hidden_layers=7)
    ).requires_grad_(False)
    sizes = (4, 4, 12) if kind == "eagle1" else (4, 2, 16)
    config = HeadConfig(
        48, 96, kind == "eagle3", 40, *sizes, draft_vocab_size=40, rms_norm_eps=1e-5
    )
    tensors = head_tensors(kind)
    network.model.embed_tokens.weight.data = tensors.pop("embed_tokens.weight")
    ids = torch.zeros(0, dtype=torch.int64)
    if kind == "eagle3":
        ids = tensors.pop("d2t") + torch.arange(40)
        del tensors["t2d"]
    head = Head(config, network, ids, seed=1)
    head.load_state_dict(
        {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
    )
    return head, network


def check(got: Tensor, wanted: Tensor) -> None:
    assert_near(got, wanted, head_rounding(wanted))


@torch.inference_mode()
def test_the_training_time_test_is_specforges() -> None:
    (head, network), wanted = table_head("eagle3"), told("eagle3")
    tokens, features = wanted["ids"], wanted["features"]
    padded = torch.cat([features, features[:, :NUM_STEPS]], 1)
    steps = head.unrolled(network, tokens, padded, NUM_STEPS)
    assert len(steps) == NUM_STEPS and steps[0].shape[1] == NUM_ROWS
    for k, made in enumerate(steps):
        check(made, wanted[f"hidden.{k}"])
        check(head.logits(network, made), wanted[f"logits.{k}"])


@torch.inference_mode()
def test_eagle_1_is_eagle_llm() -> None:
    (head, network), wanted = table_head("eagle1"), told("eagle1")
    features = torch.cat([wanted["features"], wanted["features"][:, :1]], 1)
    [made] = head.unrolled(network, wanted["ids"][:, : NUM_ROWS + 1], features, 1)
    check(made, wanted["first"])


def test_losses_are_the_authors_own() -> None:
    table = load_file(DATA / "eagle_losses.safetensors")
    said, truth, t2d = table["said"], table["truth"], table["t2d"]
    mask = t2d[truth.argmax(-1)]
    assert 0 < int(mask.sum()) < mask.numel(), "some places are masked"
    got = token_loss(said, truth[..., t2d].softmax(-1), mask)
    check_loss(got, table["eagle3"], truth.numel())
    made, wanted, head = table["made"], table["wanted"], table["head"]
    check_loss(feature_loss(made, wanted), table["vloss"], made.numel())
    say = token_loss(made @ head.T, (wanted @ head.T).softmax(-1))
    got = feature_loss(made, wanted) + TOKEN_WEIGHT * say
    check_loss(got, table["loss"], made.numel())


def check_loss(got: Tensor, wanted: Tensor, num_terms: int) -> None:
    """Compare two losses that are computed in fp32."""
    assert_near(got, wanted, 2 * rounding(num_terms / NUM_LANES, float(wanted)))


def test_top_k_distillation_is_the_papers() -> None:
    """arXiv 2408.15766, equation 3: - sum over the K most likely tokens of q(x) log p(x)."""
    generator = torch.Generator().manual_seed(4)
    logits, truth = torch.randn(2, 1, 6, 30, generator=generator)
    teacher, total = truth.softmax(-1), 0.0
    for i in range(6):
        order = sorted(range(30), key=lambda x: -float(teacher[0, i, x]))[:10]
        p = logits[0, i].softmax(-1)
        total -= sum(float(teacher[0, i, x]) * float(p[x].log()) for x in order)
    check_loss(top_loss(logits, teacher), torch.tensor(total / 6), 6 * 10)


@pytest.mark.parametrize("kind", often(["eagle", "hass", "eagle3"], ["hass", "eagle3"]))
def test_a_head_learns_and_drafts_what_it_learnt(tmp_path: Path, kind: str) -> None:
    """A few steps on one text lower the loss. The saved head can be loaded by a rank, and its
    drafts after that text are those of training."""
    network = load_network(TINY_MODEL).requires_grad_(False)
    ids = torch.arange(256).roll(13)
    head = Head(
        HeadConfig(192, 2048, kind == "eagle3", draft_vocab_size=256), network, ids.sort().values, 3
    )
    windows = torch.randint(5, 250, (2, 65), generator=torch.Generator().manual_seed(2))
    num_steps = {"eagle": 1, "hass": 3, "eagle3": 4}[kind]
    if kind == "eagle3":
        head.rescale(read(network, head, windows)[1])
        assert head.scale_F.unique().numel() == 3 and not (head.scale_F == 1).any()
    adam = torch.optim.Adam(head.parameters(), lr=3e-3)
    values = []
    for _ in range(12):
        loss = head_losses(network, head, num_steps, float(kind == "hass"), windows)
        assert loss.shape == (num_steps,)
        values.append(float(loss.mean().detach()))
        loss.mean().backward()
        adam.step()
        adam.zero_grad()
    assert values[-1] < 0.9 * values[0], values
    shares, length = agreement(network, head, windows)
    assert len(shares) == 3 and 1 <= length <= 4
    save(head, network, tmp_path)
    drafter = loaded_head(kind, tmp_path).drafter
    assert isinstance(drafter, EagleDrafter)
    assert drafter.taps == (taps(10) if kind == "eagle3" else ())
    check_drafts(drafter, network, load_saved(head), windows[:1, :20])


def load_saved(head: Head) -> Head:
    """Round the weights to bf16, as they are saved, with the scale of the features folded into
    fc."""
    head.fc.weight.data *= head.scale_F
    head.scale_F = torch.ones_like(head.scale_F)
    for weight in head.parameters():
        weight.data = weight.data.bfloat16().float()
    return head


@torch.inference_mode()
def check_drafts(drafter: EagleDrafter, network: Network, head: Head, tokens: Tensor) -> None:
    """Check that the logits of training step 0 are those of pass 1."""
    from tests.unit.test_eagle import rows, run

    has_taps = head.config.has_taps
    out = network(tokens, taps(10) if has_taps else ())
    features = torch.cat(out.tapped, -1) if has_taps else out.hidden
    [made] = head.unrolled(network, tokens, features, 1)
    wanted = head.logits(network, made)[0]
    cache = torch.zeros(8, 4, drafter.cache_groups[0].width)
    caches = {"eagle": [cache]}
    batch = rows(tokens[0, 1:17], 0)
    got = drafter._logits(run(drafter, batch, features[0, :16], caches))
    known = head.ids_U if has_taps else torch.arange(2048)
    size = float(wanted[:16].abs().max())
    assert_near(got[:, known], wanted[:16], network_rounding(10, 192, size))
