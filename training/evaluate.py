"""Held-out loss of a checkpoint, and agreement of its MTP drafts with the main model."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training import corpus
from training.export import load_tensors
from training.model import Network
from training.network import NetworkConfig

DEPTH = 3


@dataclass(frozen=True)
class Evaluation:
    """Quality of a checkpoint. A draft is right if it equals the main model's argmax.

    Attributes:
        loss: Loss in nats per token.
        agreement: Share of rows whose draft is right, by depth from 1.
        accepted: Expected tokens per step with 1, 2, ... drafts and true tokens as context.
    """

    loss: float
    agreement: list[float]
    accepted: list[float]


def held_out_windows(tokenizer: Tokenizer, length: int, num: int | None = None) -> Tensor:
    """Return windows [N, length + 1], spread evenly over the held-out documents.

    A document is BOS + file + EOS. ``num`` is the maximum number of windows, None for all.
    """
    stream: list[int] = []
    for path in corpus.held_out_files():
        ids = corpus.encode(tokenizer, corpus.read_text(path))
        stream += [corpus.BOS_ID, *ids, corpus.EOS_ID]
    windows = torch.tensor(stream).unfold(0, length + 1, length)
    if num is None or num >= len(windows):
        return windows
    return windows[torch.linspace(0, len(windows) - 1, num).long()]


@torch.inference_mode()
def evaluate(network: Network, windows: Tensor, batch: int = 8) -> Evaluation:
    """Evaluate a network on windows [N, T + 1], with true tokens as context."""
    loss = 0.0
    hits = torch.zeros(DEPTH)
    runs = torch.zeros(DEPTH)
    rows = 0
    for window in windows.split(batch):
        tokens, targets = window[:, :-1], window[:, 1:]
        out = network(tokens)
        loss += float(F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        drafts, _ = network.draft(tokens, out.hidden, DEPTH)
        count = drafts[0].shape[1]
        best = out.logits.argmax(-1)
        run = torch.ones(len(window), count, dtype=torch.bool)
        for k, logits in enumerate(drafts):
            right = logits.argmax(-1) == best[:, k + 1 : k + 1 + count]
            run &= right
            hits[k] += right.sum()
            runs[k] += run.sum()
        rows += run.numel()
    accepted = 1 + (runs / rows).cumsum(0)
    return Evaluation(loss / windows[:, 1:].numel(), (hits / rows).tolist(), accepted.tolist())


@torch.inference_mode()
def measure_drafts(
    windows: Tensor, predict: Callable[[Tensor], tuple[Tensor, list[Tensor]]]
) -> tuple[list[float], float]:
    """Measure how often drafts equal the main model's choice, with true tokens as context.

    Args:
        windows: Held-out windows [N, T + 1].
        predict: Function of tokens [B, T]. It returns the main model's choices [B, T], and
            choices [B, R] of each draft. Row i of draft k is for position i + k.

    Returns:
        The share of positions at which each draft is right. The expected number of tokens per
        step, in which a draft counts if all drafts before it are right.
    """
    shares: list[Tensor] = []
    runs: list[Tensor] = []
    for window in windows.split(8):
        best, drafts = predict(window[:, :-1])
        right = [one == best[:, k : k + one.shape[1]] for k, one in enumerate(drafts, 1)]
        both = torch.stack(right).flatten(1)
        shares.append(both.float())
        runs.append(both.float().cumprod(0))
    return torch.cat(shares, 1).mean(1).tolist(), 1 + float(torch.cat(runs, 1).mean(1).sum())


def load_network(folder: Path) -> Network:
    """Load a checkpoint folder that training.export has written, in fp32."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {field.name for field in fields(NetworkConfig)}
    network = Network(NetworkConfig(**{k: v for k, v in settings.items() if k in names}))
    load_tensors(network, load_file(folder / "model.safetensors"))
    return network.eval()


def main() -> None:
    """Run the command line of python -m training.evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "tiny-v3"
    parser.add_argument("--checkpoint", type=Path, default=default, help="checkpoint folder")
    parser.add_argument("--length", type=int, default=256, help="window length in tokens")
    parser.add_argument("--windows", type=int, default=None, help="number of windows (default all)")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    windows = held_out_windows(tokenizer, arguments.length, arguments.windows)
    result = evaluate(load_network(arguments.checkpoint), windows)
    print(f"held-out loss: {result.loss:.4f} nats/token ({windows[:, 1:].numel()} tokens)")
    for depth, share in enumerate(result.agreement, 1):
        print(f"depth {depth}: agreement {share:.4f}, n={depth}: {result.accepted[depth - 1]:.3f}")


if __name__ == "__main__":
    main()
