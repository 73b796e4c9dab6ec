"""Evaluates the finished checkpoint, plots its loss curve and writes its model card."""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path

import matplotlib
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training import corpus, train
from training.evaluate import Evaluation, evaluate, held_out_windows, load_network
from training.network import NetworkConfig
from training.tuning import CACHE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

_SMOOTH = 20
_CARD = """\
---
library_name: transformers
tags: [deepseek_v3, mtp, code]
---

# tiny-v3

A small, real DeepSeek-V3 model with one multi-token-prediction (MTP) layer. It is made for tests
and benchmarks of speculative decoding: small enough for a laptop's CPU, trained enough that its
drafts are accepted at a realistic rate. It continues Python source code; it is not an assistant.

It has every part of DeepSeek-V3: multi-head latent attention with a compressed query, grouped
sigmoid routing with correction biases, a shared expert, and an MTP layer stored as
`model.layers.{layers}.*` with copies of embedding and head. Weights are bf16, the routing biases
fp32. `transformers` loads it as `DeepseekV3ForCausalLM`.

## Architecture

| field | value |
|---|---|
{architecture}
| parameters, main model | {main_parameters:,} |
| parameters, MTP layer without the shared embedding and head | {mtp_parameters:,} |

## Training

- Corpus: the `.py` files of the Python {python} standard library, without tests and
  site-packages: {train_files} files, {stream:,} tokens. {held_out_files} further files, chosen by
  a hash of their path, are held out (`training/corpus.py`).
- Tokenizer: byte-level BPE with {vocab:,} entries, trained on the training files.
- Loss: next-token cross-entropy plus the weighted mean loss of MTP depths 1 to 3. The MTP layer is
  unrolled over its own output with the attention that inference uses; its target is {soft:.0%} the
  main model's own distribution and {hard:.0%} the next token.
- Optimiser: Muon for the hidden matrices, AdamW for the rest, in fp32; warm-up, constant rate,
  linear decay from {decay:.0%} of the schedule on. Windows of 256 tokens, in the last fifth 1,024
  and then 2,048. Expert load is balanced by the correction biases alone, without a loss for it.
- Run: {tokens:,} tokens in {steps:,} steps, {minutes:.0f} minutes on two CPU cores. It was stopped
  once and resumed with another schedule length and MTP weight, as the commands show.
- Draft tuning: then the MTP layer alone was trained for {tune_steps:,} steps of 4,096 tokens, half
  of them greedy continuations by the frozen main model, with the main model's output as target.
  It raised the tokens per step at n = 3, true tokens as context, from 2.79 to 2.82 on a sample of
  the held-out windows; in greedy continuation it changed nothing measurable (3.30 and 3.31).

```
python -m training.train --state STATE --max-minutes 85 --mtp-weight 0.3  # stopped at 5.0 M tokens
python -m training.train --state STATE --max-minutes 67
python -m training.tune_drafts{tune_options}
python -m training.report --state STATE
```

![loss curve](loss.png)

## Results

On the held-out files, with true tokens as context ({evaluated:,} tokens, windows of 256).
Agreement at depth k is the share of rows whose k-th draft equals the main model's argmax.

| measure | value |
|---|---|
| held-out loss | {loss:.3f} nats/token |
{agreement}
| tokens per step, n = 1, 2, 3 (true tokens as context) | {accepted} |

Greedy continuations of a model this small often fall into loops, which are easy to draft: accepted
lengths there are higher than with true tokens as context.

{benchmark}
"""
_BEGIN, _END = "<!-- accepted length: begin -->", "<!-- accepted length: end -->"
_BENCHMARK = f"""\
{_BEGIN}
Accepted length in greedy continuation, measured by `python -m benchmarks.accepted_length`:

| drafts n | accepted length (tokens per step) |
|---|---|
| 1 | |
| 2 | |
| 3 | |
{_END}"""


def parse_history(path: Path) -> tuple[list[dict], list[dict]]:
    """Return the training records and the held-out records of a run's history.json."""
    history = json.loads(path.read_text(encoding="utf-8"))
    return [r for r in history if "loss" in r], [r for r in history if "held_out" in r]


def plot(training: list[dict], held_out: list[dict], path: Path) -> None:
    """Plot the losses of the trunk and of the MTP depths over the number of tokens."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for label, values in (
        ("training", [r["loss"] for r in training]),
        ("MTP depth 1 (soft targets)", [r["mtp"][0] for r in training]),
        ("MTP depth 3 (soft targets)", [r["mtp"][2] for r in training]),
    ):
        smooth = torch.tensor(values).unfold(0, _SMOOTH, 1).mean(-1)
        tokens = [r["tokens"] / 1e6 for r in training[_SMOOTH - 1 :]]
        axes.plot(tokens, smooth, label=label, linewidth=1)
    tokens = [r["tokens"] / 1e6 for r in held_out]
    axes.plot(
        tokens,
        [r["held_out"]["loss"] for r in held_out],
        "ko-",
        label="held-out (32 windows)",
        ms=3,
    )
    axes.set(xlabel="million tokens", ylabel="nats per token", ylim=(1.5, 5))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def architecture_table(config: NetworkConfig) -> str:
    """Return the rows of the model card's architecture table."""
    return "\n".join(f"| {name} | {value} |" for name, value in asdict(config).items())


def num_parameters(folder: Path, config: NetworkConfig) -> tuple[int, int]:
    """Return the numbers of parameters of the main model and of the MTP layer.

    The embedding and head of the MTP layer do not count, because they are shared.
    """
    sizes = {name: t.numel() for name, t in load_file(folder / "model.safetensors").items()}
    mtp = f"model.layers.{config.num_hidden_layers}."
    shared = (f"{mtp}embed_tokens.weight", f"{mtp}shared_head.head.weight")
    main = sum(size for name, size in sizes.items() if not name.startswith(mtp))
    return main, sum(sizes.values()) - main - sum(sizes[name] for name in shared)


def benchmark_block(card: Path) -> str:
    """Return the accepted-length table of an existing model card, or an empty table."""
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    if _BEGIN not in text or _END not in text:
        return _BENCHMARK
    return text[text.index(_BEGIN) : text.index(_END)] + _END


def model_card(arguments: argparse.Namespace, result: Evaluation, evaluated: int) -> str:
    """Return the model card, the text of the checkpoint's README.md."""
    config = NetworkConfig()
    state = torch.load(arguments.state / "state.pt", weights_only=True)
    steps, tokens, seconds = state["position"]
    tuned = json.loads((arguments.tuned / "history.json").read_text(encoding="utf-8"))
    tune_steps = tuned["history"][-1]["step"]
    main_parameters, mtp_parameters = num_parameters(arguments.checkpoint, config)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    agreement = (
        f"| draft agreement, depth {depth} | {share:.1%} |"
        for depth, share in enumerate(result.agreement, 1)
    )
    return _CARD.format(
        architecture=architecture_table(config),
        layers=config.num_hidden_layers,
        main_parameters=main_parameters,
        mtp_parameters=mtp_parameters,
        python=".".join(platform.python_version_tuple()[:2]),
        train_files=len(corpus.train_files()),
        held_out_files=len(corpus.held_out_files()),
        stream=len(train.token_stream(tokenizer)),
        vocab=config.vocab_size,
        soft=train.SOFT_SHARE,
        hard=1 - train.SOFT_SHARE,
        decay=train.DECAY_START,
        tokens=tokens,
        steps=steps,
        minutes=seconds / 60,
        tune_steps=tune_steps,
        tune_options=arguments.tune_options,
        benchmark=benchmark_block(arguments.checkpoint / "README.md"),
        evaluated=evaluated,
        loss=result.loss,
        agreement="\n".join(agreement),
        accepted=", ".join(f"{value:.2f}" for value in result.accepted),
    )


def main() -> None:
    """Run the command line of python -m training.report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path(__file__).parent / "tiny-v3", help="folder")
    add("--state", type=Path, required=True, help="state folder of the training run")
    add("--tuned", type=Path, default=CACHE / "mtp", help="state folder of the draft tuning")
    add("--tune-options", default="", help="options of the draft tuning, for the model card")
    arguments = parser.parse_args()
    training, held_out = parse_history(arguments.state / "history.json")
    plot(training, held_out, arguments.checkpoint / "loss.png")
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    windows = held_out_windows(tokenizer, 256)
    result = evaluate(load_network(arguments.checkpoint), windows)
    print(result)
    card = model_card(arguments, result, windows[:, 1:].numel())
    (arguments.checkpoint / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
