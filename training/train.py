"""Trains the tiny DeepSeek-V3 checkpoint on a CPU: python -m training.train."""

import argparse
import ctypes
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from training import corpus
from training.evaluate import DEPTH, evaluate, held_out_windows
from training.export import export
from training.model import Network
from training.muon import Muon
from training.network import NetworkConfig
from training.tokenizer import load_or_train

DECAY_START = 0.55
WARMUP_STEPS = 80
STAGES = ((0.0, 16, 256, 8), (0.8, 4, 1024, 4), (0.93, 2, 2048, 1))
BOS_SHARE = 0.3
SOFT_SHARE = 0.7
BALANCE_RATE = 2e-3


def keep_freed_memory() -> None:
    """Stop glibc from returning large buffers to the system after every operation."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)


def token_stream(tokenizer: Tokenizer) -> Tensor:
    """Return all training documents, BOS + file + EOS each, concatenated to [N] token ids."""
    stream: list[int] = []
    for path in corpus.train_files():
        ids = corpus.encode(tokenizer, corpus.read_text(path))
        stream += [corpus.BOS_ID, *ids, corpus.EOS_ID]
    return torch.tensor(stream)


def sample(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random windows [batch, length + 1]; a share of BOS_SHARE starts with BOS."""
    starts = torch.randint(len(stream) - length - 1, (batch, 1), generator=generator)
    windows = stream[starts + torch.arange(length + 1)]
    windows[torch.rand(batch, generator=generator) < BOS_SHARE, 0] = corpus.BOS_ID
    return windows


def losses(network: Network, windows: Tensor, drafted: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of the trunk and of each MTP depth in nats per token, and expert loads.

    The first ``drafted`` windows train the MTP layer. Its target mixes the next tokens with the
    trunk's own distribution, because a draft is accepted if it equals the trunk's choice.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    out = network(tokens)
    main = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    teacher = out.logits[:drafted].detach().softmax(-1)
    drafts, load = network.draft(tokens[:drafted], out.hidden[:drafted], DEPTH)
    values = []
    for depth, logits in enumerate(drafts, 1):
        rows = slice(depth, depth + logits.shape[1])
        label = logits.gather(-1, targets[:drafted, rows, None]).squeeze(-1)
        soft = (teacher[:, rows] * logits).sum(-1)
        goal = SOFT_SHARE * soft + (1 - SOFT_SHARE) * label
        values.append((logits.logsumexp(-1) - goal).mean())
    return main, torch.stack(values), torch.stack([*out.loads, load])


class Trainer:
    """A training run: network, optimizers and the position in the schedule."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer) -> None:
        self.arguments, self.tokenizer = arguments, tokenizer
        self.network = Network(NetworkConfig(), seed=arguments.seed)
        self.optimizers = self._optimizers()
        self.generator = torch.Generator().manual_seed(arguments.seed)
        self.stream = token_stream(tokenizer)
        self.held_out = held_out_windows(tokenizer, 256, 32)
        self.losses = torch.compile(losses, dynamic=False) if arguments.compile else losses
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.history: list[dict] = []

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        matrices, embeddings, others = [], [], []
        for name, weight in self.network.named_parameters():
            if name == "model.embed_tokens.weight":
                embeddings.append(weight)
            elif weight.dim() == 1 or name.endswith(("lm_head.weight", "mlp.gate.weight")):
                others.append(weight)
            else:
                matrices.append(weight)
        groups = [
            {"params": embeddings, "lr": self.arguments.embedding_lr},
            {"params": others, "lr": self.arguments.adam_lr},
        ]
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        optimizers = [Muon(matrices, self.arguments.muon_lr), adam]
        for group in (group for o in optimizers for group in o.param_groups):
            group["peak"] = group["lr"]
        return optimizers

    def progress(self) -> float:
        """Return the completed share of the schedule, by tokens or by time, if that is more."""
        by_time = self.seconds / 60 / self.arguments.max_minutes
        return max(self.tokens / self.arguments.total_tokens, by_time)

    def train_step(self) -> dict:
        """Update the network once; return the losses and the gradient norm."""
        started = time.monotonic()
        done = self.progress()
        rate = min(1.0, (self.step + 1) / WARMUP_STEPS, (1 - done) / (1 - DECAY_START))
        for group in (group for o in self.optimizers for group in o.param_groups):
            group["lr"] = max(rate, 0.0) * group["peak"]
        _, batch, length, drafted = [stage for stage in STAGES if stage[0] <= done][-1]
        windows = sample(self.stream, batch, length, self.generator)
        compute = losses if length > STAGES[0][2] else self.losses
        main, mtp, loads = compute(self.network, windows, drafted)
        (main + self.arguments.mtp_weight * mtp.mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._balance(loads, rate)
        self.step += 1
        self.tokens += batch * length
        self.seconds += time.monotonic() - started
        return {"loss": main.item(), "mtp": mtp.tolist(), "norm": norm.item()}

    @torch.no_grad()
    def _balance(self, loads: Tensor, rate: float) -> None:
        """Balance expert loads without an auxiliary loss, by the routing biases.

        The bias of experts below the mean load is raised, and of those above it lowered.
        """
        biases = [b for n, b in self.network.named_buffers() if n.endswith("correction_bias")]
        moves = torch.sign(loads.mean(-1, keepdim=True) - loads)
        for bias, move in zip(biases, moves, strict=True):
            bias.add_(move, alpha=BALANCE_RATE * max(rate, 0.0))

    def report(self) -> None:
        """Evaluate the network, export the checkpoint and save the state to resume from."""
        result = evaluate(self.network, self.held_out)
        self.history.append({"tokens": self.tokens, "held_out": asdict(result)})
        tqdm.write(f"step {self.step} tokens {self.tokens} {result}")
        export(self.network, self.tokenizer, self.arguments.output)
        self.save()

    def save(self) -> None:
        """Write state.pt and history.json to the state folder."""
        folder = self.arguments.state
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "position": (self.step, self.tokens, self.seconds),
            "history": self.history,
        }
        torch.save(state, folder / "state.tmp")
        (folder / "state.tmp").replace(folder / "state.pt")
        (folder / "history.json").write_text(json.dumps(self.history), encoding="utf-8")

    def resume(self) -> None:
        """Resume from the state folder, if it has a state."""
        path = self.arguments.state / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        self.generator.set_state(state["generator"])
        self.step, self.tokens, self.seconds = state["position"]
        self.history = state["history"]

    def run(self) -> None:
        """Train to the end of the schedule."""
        exported = time.monotonic()
        with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}{elapsed}{postfix}") as bar:
            while self.progress() < 1:
                values = self.train_step()
                bar.update(100 * self.progress() - bar.n)
                if self.step % 10 == 0:
                    self.history.append({"tokens": self.tokens, **values})
                    rate = self.tokens / self.seconds
                    bar.set_postfix(loss=values["loss"], step=self.step, tok_s=f"{rate:.0f}")
                if time.monotonic() - exported > 60 * self.arguments.export_minutes:
                    self.report()
                    exported = time.monotonic()
        self.report()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line of the training run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, default=Path(__file__).parent / "tiny-v3", help="checkpoint folder")
    add("--state", type=Path, required=True, help="folder of the resumable state, outside git")
    add("--max-minutes", type=float, default=90, help="length of the schedule in minutes")
    add("--total-tokens", type=float, default=40e6, help="length of the schedule in tokens")
    add("--export-minutes", type=float, default=8, help="minutes between exports")
    add("--muon-lr", type=float, default=5e-3, help="peak rate of the hidden matrices")
    add("--adam-lr", type=float, default=3e-3, help="peak rate of head, norms and router")
    add("--embedding-lr", type=float, default=8e-3, help="peak rate of the embedding")
    add("--mtp-weight", type=float, default=1.0, help="weight of the mean MTP loss")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="seed of initialisation and sampling")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")
    return parser.parse_args()


def main() -> None:
    """Run the training that the command line describes."""
    arguments = parse_arguments()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    trainer = Trainer(arguments, load_or_train(arguments.output))
    trainer.resume()
    trainer.run()


if __name__ == "__main__":
    main()
