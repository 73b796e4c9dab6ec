"""Tunes the MTP layer of a finished checkpoint on the main model's own continuations.

The main model stays as it is, bit for bit. Speculative decoding drafts for text that the main
model writes itself, so every second step trains on its greedy continuations of training files.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from benchmarks.driven.engines import Bench, greedy, load
from training.corpus import BOS_ID
from training.evaluate import DEPTH, evaluate, held_out_windows, load_network
from training.export import export
from training.model import Network
from training.muon import Muon
from training.train import keep_freed_memory, sample, token_stream

LENGTH = 256
PROMPT_LENGTH = 64
OWN_BATCH = 16
CORPUS_BATCH = (4, 1024)
SOFT_SHARE = 0.7
WARMUP_STEPS = 20


def continuations(folder: Path, stream: Tensor, num: int, batch: int, seed: int) -> Tensor:
    """Greedy continuations [num, LENGTH + 1] of training text by the main model, written by our own
    engines."""
    num_threads = torch.get_num_threads()
    loaded = load(folder, "model.dtype=float32", f"decode.num_threads={num_threads}")
    bench = Bench(loaded, max_rows=batch, num_pages=batch * 6, page_size=64)
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in tqdm(range(num // batch), desc="continuations"):
        prompts = sample(stream, batch, PROMPT_LENGTH - 1, generator)
        prompts[:, 0] = BOS_ID
        num_new = LENGTH + 1 - PROMPT_LENGTH
        asked = [
            greedy(f"r{i}", ids, num_new, ignore_eos=True) for i, ids in enumerate(prompts.tolist())
        ]
        answers = bench.generate(*asked)
        texts += [
            [*one.prompt_ids, *tokens] for one, (tokens, _) in zip(asked, answers, strict=True)
        ]
    torch.set_num_threads(num_threads)  # which engines with kernels of their own leave one
    return torch.tensor(texts)


def draft_losses(network: Network, windows: Tensor) -> Tensor:
    """Loss of every MTP depth in nats per token, against the frozen main model.

    The target is SOFT_SHARE the main model's distribution, the rest is its argmax.
    """
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


def draft_loss(logits: Tensor, teacher: Tensor, best: Tensor) -> Tensor:
    """Mean over all places of the cross-entropy to the main model's distribution and choice
    [.., 1] at the same places."""
    choice = logits.gather(-1, best).squeeze(-1)
    goal = SOFT_SHARE * (teacher * logits).sum(-1) + (1 - SOFT_SHARE) * choice
    return (logits.logsumexp(-1) - goal).mean()


def draft_optimizers(network: Network, muon_lr: float, adam_lr: float) -> list:
    """Optimisers of the MTP layer's own parameters; everything else is frozen."""
    network.requires_grad_(False)
    network.mtp.requires_grad_(True)
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in network.mtp.named_parameters():
        small = weight.dim() == 1 or name.endswith("mlp.gate.weight")
        (others if small else matrices).append(weight)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, muon_lr), adam]


def tune(
    losses: Callable[[Tensor], Tensor],
    optimizers: list,
    own: Tensor,
    stream: Tensor,
    arguments: argparse.Namespace,
) -> list:
    """Trains what the optimisers hold for --max-minutes by the ``losses`` of windows; returns one
    record per ten steps."""
    peaks = [group["lr"] for o in optimizers for group in o.param_groups]
    generator = torch.Generator().manual_seed(arguments.seed)
    history: list[dict] = []
    started, step, done = time.monotonic(), 0, 0.0
    with tqdm(total=100, bar_format="{l_bar}{bar}{elapsed}{postfix}") as bar:
        while done < 1:
            rate = min(1 - done, (step + 1) / WARMUP_STEPS)
            groups = [group for o in optimizers for group in o.param_groups]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = rate * peak
            if step % 2:
                windows = sample(stream, *CORPUS_BATCH, generator)
            else:
                windows = own[torch.randint(len(own), (OWN_BATCH,), generator=generator)]
            values = losses(windows)
            values.mean().backward()
            torch.nn.utils.clip_grad_norm_([w for g in groups for w in g["params"]], 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            done = (time.monotonic() - started) / 60 / arguments.max_minutes
            bar.update(min(100 * done, 100) - bar.n)
            if step % 10 == 0:
                history.append({"step": step, "drafts": values.tolist()})
                bar.set_postfix(step=step, losses=[round(x, 3) for x in values.tolist()])
    return history


def add_schedule(parser: argparse.ArgumentParser, max_minutes: float) -> None:
    """Options of any run of ``tune``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path(__file__).parent / "tiny-v3", help="main model")
    add("--max-minutes", type=float, default=max_minutes, help="length of the schedule in minutes")
    add("--continuations", type=int, default=1024, help="number of greedy continuations")
    add("--batch", type=int, default=32, help="continuations generated at a time")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=1, help="seed of prompts and sampling")


def parse_arguments() -> argparse.Namespace:
    """Command line of the tuning run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_schedule(parser, max_minutes=14)
    add = parser.add_argument
    add("--state", type=Path, required=True, help="folder of the record, outside git")
    add("--muon-lr", type=float, default=3e-3, help="peak rate of the matrices")
    add("--adam-lr", type=float, default=1e-3, help="peak rate of norms and router")
    return parser.parse_args()


def main() -> None:
    """Runs the tuning described on the command line."""
    arguments = parse_arguments()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    folder = arguments.checkpoint
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network = load_network(folder)
    held_out = held_out_windows(tokenizer, LENGTH, 32)
    print("before", evaluate(network, held_out), flush=True)
    stream = token_stream(tokenizer)
    own = continuations(folder, stream, arguments.continuations, arguments.batch, arguments.seed)
    optimizers = draft_optimizers(network, arguments.muon_lr, arguments.adam_lr)
    losses = partial(draft_losses, network)
    history = tune(losses, optimizers, own, stream, arguments)
    print("after", evaluate(network, held_out), flush=True)
    export(network, tokenizer, folder)
    arguments.state.mkdir(parents=True, exist_ok=True)
    (arguments.state / "drafts.json").write_text(json.dumps(history), encoding="utf-8")


if __name__ == "__main__":
    main()
