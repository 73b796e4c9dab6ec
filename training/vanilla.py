"""Trains one MTP module per draft, as in DeepSeek-V3: python -m training.vanilla.

The modules (arXiv 2412.19437, section 2.2) are initialised with the MTP layer of a finished
checkpoint, which is not changed. Module k reads the output of module k - 1 for the same row and the
token k positions after the row's. The output folder is a checkpoint; the main model's files are
linked, not copied.
"""

import argparse
import json
import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from training.evaluate import held_out_windows, measure_drafts
from training.export import layer_tensors
from training.model import MtpLayer, Network
from training.tuning import (  # fmt: skip
    LENGTH,
    TrainingRun,
    add_rates,
    add_schedule,
    chain_losses,
    draft_optimizers,
    load_setup,
    write_report,
)

LINKED = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
MAIN, MODULES = "main.safetensors", "modules.safetensors"


class Modules(nn.Module):
    """A chain of MTP modules, initialised as copies of the network's MTP layer."""

    def __init__(self, network: Network, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(deepcopy(network.mtp) for _ in range(num))
        self.layers.requires_grad_(True)

    def forward(self, network: Network, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        """Return logits [B, R, V] of each of K modules, for R = T - K rows.

        Row i of module k reads token i + k and predicts token i + k + 1.
        """
        rows = tokens.shape[1] - len(self.layers)
        state, logits = hidden[:, :rows], []
        for k, layer in enumerate(self.layers, 1):
            assert isinstance(layer, MtpLayer)
            x = layer.mix(network.model.embed_tokens(tokens[:, k : k + rows]), state)
            x, _ = layer(x, network.angles[:, k : k + rows])
            state = layer.shared_head.norm(x)
            logits.append(network.lm_head(state))
        return logits


def chain_drafts(network: Network, modules: Modules) -> Callable[[Tensor, Tensor], list[Tensor]]:
    return lambda tokens, hidden: modules(network, tokens, hidden)


def agreement(network: Network, modules: Modules, windows: Tensor) -> tuple[list[float], float]:
    """Return the agreement of drafts with the main model, see evaluate.measure_drafts."""

    def predict(tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = network(tokens)
        drafts = modules(network, tokens, out.hidden)
        return out.logits.argmax(-1), [logits.argmax(-1) for logits in drafts]

    return measure_drafts(windows, predict)


def save(modules: Modules, base: Path, folder: Path) -> None:
    """Write a checkpoint with these modules in place of the MTP layers of ``base``."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    first, num = settings["num_hidden_layers"], len(modules.layers)
    settings["num_nextn_predict_layers"] = num
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(modules.layers):
        tensors |= layer_tensors(layer, f"model.layers.{first + i}.")
    save_file(tensors, folder / MODULES, metadata={"format": "pt"})
    with safe_open(str(base / "model.safetensors"), framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith(f"model.layers.{first}.")]  # noqa: SIM118
    weight_map = dict.fromkeys(names, MAIN) | dict.fromkeys(tensors, MODULES)
    index = {"metadata": {}, "weight_map": weight_map}
    for name, value in (("config.json", settings), ("model.safetensors.index.json", index)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    for name, source in ((MAIN, "model.safetensors"), *((name, name) for name in LINKED)):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(base / source, folder))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_schedule(parser, "vanilla", num_steps=1800)
    add, default = parser.add_argument, Path(__file__).parent / "tiny-v3-vanilla"
    add("--out", type=Path, default=default, help="folder of the checkpoint")
    add("--num-modules", type=int, default=3)
    add_rates(parser, muon=3e-3, adam=1e-3)
    return parser.parse_args()


def main() -> None:
    """Train the modules and print how often each is right on held-out text before and after."""
    arguments = parse_arguments()
    texts = load_setup(arguments)
    modules = Modules(texts.network, arguments.num_modules)
    held_out = held_out_windows(texts.tokenizer, LENGTH, 64)
    print("before", agreement(texts.network, modules, held_out), flush=True)
    optimizers = draft_optimizers(modules, arguments.muon_lr, arguments.adam_lr)
    losses = partial(chain_losses, texts.network, chain_drafts(texts.network, modules))
    run = TrainingRun(modules, losses, optimizers, texts, arguments).run()
    shares, length = agreement(texts.network, modules, held_out)
    print("after", shares, length, f"{run.seconds / 60:.0f} min")
    save(modules, arguments.checkpoint, arguments.out)
    write_report(run, arguments.out, right_behind_true_text=shares, tokens_behind_true_text=length)


if __name__ == "__main__":
    main()
