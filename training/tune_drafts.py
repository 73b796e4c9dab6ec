"""Tunes the MTP layer of a finished checkpoint on the main model's own continuations:
python -m training.tune_drafts. The main model stays as it is, bit for bit."""

import argparse
from functools import partial

import torch
from torch import Tensor

from training.evaluate import DEPTH, evaluate, held_out_windows
from training.export import export
from training.model import Network
from training.tuning import LENGTH, Run, add_schedule, draft_loss, draft_optimizers, subject


def draft_losses(network: Network, windows: Tensor) -> Tensor:
    """Loss of every MTP depth in nats per token, against the frozen main model."""
    tokens = windows[:, :-1]
    with torch.no_grad():
        out = network(tokens)
        best = out.logits.argmax(-1, keepdim=True)
        teacher = out.logits.softmax(-1)
    drafts, _ = network.draft(tokens, out.hidden, DEPTH)
    values = []
    for depth, logits in enumerate(drafts, 1):
        rows = slice(depth, depth + logits.shape[1])
        values.append(draft_loss(logits, teacher[:, rows], best[:, rows]))
    return torch.stack(values)


def parse_arguments() -> argparse.Namespace:
    """Command line of the tuning run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_schedule(parser, "mtp", num_steps=210)
    add = parser.add_argument
    add("--muon-lr", type=float, default=3e-3, help="peak rate of the matrices")
    add("--adam-lr", type=float, default=1e-3, help="peak rate of norms and router")
    return parser.parse_args()


def main() -> None:
    """Runs the tuning described on the command line."""
    arguments = parse_arguments()
    texts = subject(arguments)
    network = texts.network
    network.mtp.requires_grad_(True)
    held_out = held_out_windows(texts.tokenizer, LENGTH, 32)
    print("before", evaluate(network, held_out), flush=True)
    optimizers = draft_optimizers(network.mtp, arguments.muon_lr, arguments.adam_lr)
    Run(network.mtp, partial(draft_losses, network), optimizers, texts, arguments).run()
    print("after", evaluate(network, held_out), flush=True)
    export(network, texts.tokenizer, arguments.checkpoint)


if __name__ == "__main__":
    main()
