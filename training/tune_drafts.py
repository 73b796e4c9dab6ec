"""Tunes the MTP layer of a finished checkpoint on the main model's own continuations:
python -m training.tune_drafts. The main model's weights are not changed."""

import argparse
from functools import partial

from torch import Tensor

from training.evaluate import DEPTH, evaluate, held_out_windows
from training.export import export
from training.tuning import (  # fmt: skip
    LENGTH,
    TrainingRun,
    add_rates,
    add_schedule,
    chain_losses,
    draft_optimizers,
    load_setup,
)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line of the tuning run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_schedule(parser, "mtp", num_steps=210)
    add_rates(parser, muon=3e-3, adam=1e-3)
    return parser.parse_args()


def main() -> None:
    """Run the tuning that the command line describes."""
    arguments = parse_arguments()
    texts = load_setup(arguments)
    network = texts.network
    network.mtp.requires_grad_(True)
    held_out = held_out_windows(texts.tokenizer, LENGTH, 32)
    print("before", evaluate(network, held_out), flush=True)
    optimizers = draft_optimizers(network.mtp, arguments.muon_lr, arguments.adam_lr)

    def drafts(tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        return network.draft(tokens, hidden, DEPTH)[0]

    losses = partial(chain_losses, network, drafts)
    TrainingRun(network.mtp, losses, optimizers, texts, arguments).run()
    print("after", evaluate(network, held_out), flush=True)
    export(network, texts.tokenizer, arguments.checkpoint)


if __name__ == "__main__":
    main()
