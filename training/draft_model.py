"""Trains a draft model of two layers for a finished checkpoint: python -m training.draft_model.

It learns the main model's output distribution. Its embedding, head and final norm are initialised
with those of the main model.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.evaluate import DEPTH, held_out_windows, measure_drafts
from training.export import hf_config, layer_tensors
from training.model import Network
from training.network import NetworkConfig
from training.tuning import (  # fmt: skip
    LENGTH,
    TrainingRun,
    add_rates,
    add_schedule,
    draft_loss,
    draft_optimizers,
    load_setup,
    write_report,
)
from training.vanilla import LINKED

SMALL = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
LATENTS = {"kv_lora_rank": 128, "qk_rope_head_dim": 32}
"""Dimensions of the cached latent: 160 values per token and layer instead of 576."""


def create_student(main: Network) -> Network:
    """Create the draft model. Its MTP layer is unused and not trained."""
    network = Network(NetworkConfig(**SMALL, **LATENTS), seed=1)
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        network.get_submodule(name).load_state_dict(main.get_submodule(name).state_dict())
    network.mtp.requires_grad_(False)
    return network


def losses(main: Network, network: Network, windows: Tensor) -> Tensor:
    """Return the loss [1] in nats per token, against the frozen main model at all positions."""
    tokens = windows[:, :-1]
    with torch.no_grad():
        logits = main(tokens).logits
        best, teacher = logits.argmax(-1, keepdim=True), logits.softmax(-1)
    return draft_loss(network(tokens).logits, teacher, best).unsqueeze(0)


def agreement(main: Network, network: Network, windows: Tensor) -> tuple[list[float], float]:
    """Return the agreement of drafts with the main model, see evaluate.measure_drafts."""

    def predict(tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        drafts = network(tokens).logits.argmax(-1)
        num = tokens.shape[1] - DEPTH
        # Draft k of row i is for position i + k and reads all tokens up to there.
        return main(tokens).logits.argmax(-1), [drafts[:, k : k + num] for k in range(1, DEPTH + 1)]

    return measure_drafts(windows, predict)


def save(network: Network, base: Path, folder: Path) -> None:
    """Write the draft model as a checkpoint, with links to the tokenizer of ``base``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(network.config) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    mtp = f"model.layers.{network.config.num_hidden_layers}."
    tensors = layer_tensors(network)
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    for name in LINKED:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(base / name, folder))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_schedule(parser, "draft_model", num_steps=1800)
    add, default = parser.add_argument, Path(__file__).parent / "tiny-v3-draft"
    add("--out", type=Path, default=default, help="folder of the checkpoint")
    add_rates(parser, muon=1e-2, adam=3e-3)
    return parser.parse_args()


def main() -> None:
    """Train the draft model and print how often it is right on held-out text."""
    arguments = parse_arguments()
    texts = load_setup(arguments)
    network, held_out = create_student(texts.network), held_out_windows(texts.tokenizer, LENGTH, 64)
    optimizers = draft_optimizers(network, arguments.muon_lr, arguments.adam_lr)
    run = TrainingRun(
        network, partial(losses, texts.network, network), optimizers, texts, arguments
    ).run()
    shares, length = agreement(texts.network, network, held_out)
    print("after", shares, length, f"{run.seconds / 60:.0f} min")
    save(network, arguments.checkpoint, arguments.out)
    write_report(run, arguments.out, right_behind_true_text=shares, tokens_behind_true_text=length)


if __name__ == "__main__":
    main()
