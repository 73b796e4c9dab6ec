"""Trains Medusa heads together with their model (MEDUSA-2, arXiv 2401.10774, section 2.2.2):
python -m training.medusa2 --out DIR.

A copy of the model is trained: DIR becomes a separate checkpoint, with the heads in DIR/heads.
First the heads are trained alone. Then both are trained, the model at a tenth of the rate. The MTP
layer is not trained and does not match the changed model.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.evaluate import evaluate, held_out_windows
from training.export import export
from training.medusa import DECAY, Heads, agreement, head_losses, save
from training.model import Network
from training.muon import Muon
from training.tuning import LENGTH, TrainingRun, TrainingSetup, add_schedule, load_setup

HEADS_WEIGHT = 0.2
"""Weight of the heads' losses relative to the model's own loss (lambda_0 in the paper)."""
MODEL_SHARE = 0.1
"""Learning rate of the model divided by that of the heads."""


def joint_losses(network: Network, heads: Heads, windows: Tensor) -> Tensor:
    """Return the model's own loss and the weighted losses of the heads, in nats per token.

    All are multiplied by their number, because TrainingRun averages them.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    out = network(tokens)
    values = [F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())]
    for i, logits in enumerate(heads(out.hidden), 1):
        loss = F.cross_entropy(logits[:, :-i].flatten(0, 1), targets[:, i:].flatten())
        values.append(HEADS_WEIGHT * DECAY**i * loss)
    return torch.stack(values) * len(values)


def optimizers(network: Network, heads: Heads, arguments: argparse.Namespace) -> list:
    """Create the optimizers: Muon for the trunk's matrices, AdamW for other parameters.

    The MTP layer is not trained.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    mtp = {id(weight) for weight in network.mtp.parameters()}
    for name, weight in network.named_parameters():
        if id(weight) in mtp:
            continue
        weight.requires_grad_(True)
        is_small = weight.dim() == 1 or name.endswith(
            ("embed_tokens.weight", "lm_head.weight", "gate.weight")
        )
        (others if is_small else matrices).append(weight)
    groups = [
        {"params": list(heads.parameters()), "lr": arguments.lr},
        {"params": others, "lr": MODEL_SHARE * arguments.lr},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, MODEL_SHARE * arguments.lr, weight_decay=0.0), adam]


def run(heads: Heads, texts: TrainingSetup, arguments: argparse.Namespace) -> float:
    """Run both stages and return their total time in minutes."""
    network, state = texts.network, arguments.state
    stage = argparse.Namespace(**vars(arguments))
    stage.state, stage.num_steps = state / "heads", arguments.num_warm_steps
    adam = torch.optim.AdamW(heads.parameters(), lr=arguments.lr, weight_decay=0.0)
    warm = TrainingRun(heads, partial(head_losses, network, heads), [adam], texts, stage).run()
    stage.state, stage.num_steps = state / "joint", arguments.num_steps
    made = optimizers(network, heads, arguments)
    both = nn.ModuleList([network, heads])
    joint = TrainingRun(both, partial(joint_losses, network, heads), made, texts, stage).run()
    return (warm.seconds + joint.seconds) / 60


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_schedule(parser, "medusa2", num_steps=460)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the new checkpoint, outside git")
    add(
        "--num-warm-steps",
        type=int,
        default=200,
        help="of the heads alone, before --num-steps of all",
    )
    add("--num-heads", type=int, default=4)
    add("--lr", type=float, default=1e-2, help="peak rate of the heads")
    return parser.parse_args()


def main() -> None:
    """Train, and print the model's held-out loss before and after and the heads' agreement."""
    arguments = parse_arguments()
    texts = load_setup(arguments)
    network, heads = texts.network, Heads(texts.network, arguments.num_heads)
    held_out = held_out_windows(texts.tokenizer, LENGTH, 64)
    before = evaluate(network, held_out)
    minutes = run(heads, texts, arguments)
    after, shares = evaluate(network, held_out), agreement(network, heads, held_out)
    export(network, texts.tokenizer, arguments.out)
    save(heads, arguments.out / "heads", arguments.checkpoint)
    told = {"loss_before": before.loss, "loss": after.loss, "heads": shares, "minutes": minutes}
    (arguments.out / "training.json").write_text(
        json.dumps(told, indent=2) + "\n", encoding="utf-8"
    )
    print(
        f"held-out loss {before.loss:.4f} -> {after.loss:.4f} nats a token, heads right at {shares}"
    )


if __name__ == "__main__":
    main()
