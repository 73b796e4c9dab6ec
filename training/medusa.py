"""Trains Medusa heads (MEDUSA-1, arXiv 2401.10774): python -m training.medusa.

The heads read the last hidden states of a finished checkpoint, which is not changed. Head i, from
0, predicts the token i + 2 positions after that of hidden state h. Its logits are a separate matrix
times h + silu(W h + b). The target is the main model's own output there. Half of the training text
is greedy continuations by the main model.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from training.evaluate import held_out_windows
from training.model import Network
from training.tuning import LENGTH, TrainingRun, add_schedule, draft_loss, load_setup, write_report

DECAY = 0.8
"""Ratio of the loss weights of successive heads."""


class Heads(nn.Module):
    """H Medusa heads, which return logits for hidden states [.., D].

    They are initialised with the main model's head.
    """

    def __init__(self, network: Network, num_heads: int) -> None:
        super().__init__()
        dim = network.config.hidden_size
        self.weight_HDD = nn.Parameter(torch.zeros(num_heads, dim, dim))
        self.bias_HD = nn.Parameter(torch.zeros(num_heads, dim))
        self.head_HVD = nn.Parameter(network.lm_head.weight.detach().repeat(num_heads, 1, 1))

    def forward(self, hidden: Tensor) -> list[Tensor]:
        parts = zip(self.weight_HDD, self.bias_HD, self.head_HVD, strict=True)
        return [
            F.linear(hidden + F.silu(F.linear(hidden, weight, bias)), head)
            for weight, bias, head in parts
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in bf16, by the names of Medusa's authors."""
        parts = zip(self.weight_HDD, self.bias_HD, self.head_HVD, strict=True)
        names = "{}.0.linear.weight", "{}.0.linear.bias", "{}.1.weight"
        return {
            name.format(i): tensor.detach().bfloat16().contiguous()
            for i, part in enumerate(parts)
            for name, tensor in zip(names, part, strict=True)
        }


def head_losses(network: Network, heads: Heads, windows: Tensor) -> Tensor:
    """Return the loss of each head in nats per token, times DECAY ** i for head i from 1."""
    with torch.no_grad():
        out = network(windows[:, :-1])
        best, teacher = out.logits.argmax(-1, keepdim=True), out.logits.softmax(-1)
    values = []
    for i, logits in enumerate(heads(out.hidden), 1):
        values.append(DECAY**i * draft_loss(logits[:, :-i], teacher[:, i:], best[:, i:]))
    return torch.stack(values)


@torch.inference_mode()
def agreement(network: Network, heads: Heads, windows: Tensor) -> list[float]:
    """Return how often each head's most likely token is the main model's."""
    out = network(windows[:, :-1])
    best = out.logits.argmax(-1)
    return [
        float((logits.argmax(-1)[:, :-i] == best[:, i:]).float().mean())
        for i, logits in enumerate(heads(out.hidden), 1)
    ]


def save(heads: Heads, folder: Path, base: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": len(heads.head_HVD),
        "medusa_num_layers": 1,
        "base_model_name_or_path": base.name,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(heads.tensors(), folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_schedule(parser, "medusa", num_steps=500)
    add, default = parser.add_argument, Path(__file__).parent / "tiny-v3-medusa"
    add("--out", type=Path, default=default, help="folder of the heads")
    add("--num-heads", type=int, default=4)
    add("--lr", type=float, default=1.5e-2, help="peak rate")
    return parser.parse_args()


def main() -> None:
    """Train heads and print how often each is right on held-out text before and after."""
    arguments = parse_arguments()
    texts = load_setup(arguments)
    network = texts.network
    heads = Heads(network, arguments.num_heads)
    held_out = held_out_windows(texts.tokenizer, LENGTH, 64)
    print("before", agreement(network, heads, held_out), flush=True)
    adam = torch.optim.AdamW(heads.parameters(), lr=arguments.lr, weight_decay=0.0, fused=True)
    run = TrainingRun(heads, partial(head_losses, network, heads), [adam], texts, arguments).run()
    shares = agreement(network, heads, held_out)
    print("after", shares, flush=True)
    save(heads, arguments.out, arguments.checkpoint)
    write_report(run, arguments.out, right_behind_true_text=shares)


if __name__ == "__main__":
    main()
