"""Training of drafters for a finished checkpoint, whose weights are not changed.

In speculative decoding, drafts continue text of the main model. Every second step therefore trains
on the main model's greedy continuations of training files. A run saves its state and resumes from
it.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from benchmarks.harness.engines import Bench, greedy, load
from training.corpus import BOS_ID
from training.evaluate import load_network
from training.model import Network
from training.muon import Muon
from training.train import keep_freed_memory, sample, token_stream

LENGTH = 256
PROMPT_LENGTH = 64
CONTINUATION_BATCH = 16
CORPUS_BATCH = (4, 1024)
SOFT_SHARE = 0.7
WARMUP_STEPS = 20
SAVE_EVERY = 50
CACHE = Path.home() / ".cache" / "tandem" / "training"


@dataclass(frozen=True)
class TrainingSetup:
    """The frozen main model and the texts to train on.

    Attributes:
        stream: Token ids of all training files, concatenated.
        continuations: Texts [N, LENGTH + 1] that the main model has continued.
        digest: Digest of the main model's weights.
    """

    network: Network
    tokenizer: Tokenizer
    stream: Tensor
    continuations: Tensor
    digest: str = ""


def load_setup(arguments: argparse.Namespace) -> TrainingSetup:
    """Load the main model and texts that the options of ``add_schedule`` select."""
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    folder = arguments.checkpoint
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = token_stream(tokenizer)
    own = continuations(folder, stream, arguments.continuations, arguments.batch, arguments.seed)
    stream, own = (x[: int(len(x) * arguments.share)] for x in (stream, own))
    network = load_network(folder).requires_grad_(False)
    return TrainingSetup(network, tokenizer, stream, own, digest_of(folder))


def digest_of(folder: Path) -> str:
    """Return the digest of a checkpoint's weights: 16 hexadecimal digits."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def continuations(folder: Path, stream: Tensor, num: int, batch: int, seed: int) -> Tensor:
    """Return greedy continuations [num, LENGTH + 1] of training text by the main model.

    Tandem's engines generate them once; later calls read them from CACHE.
    """
    kept = CACHE / f"continuations-{digest_of(folder)}-{num}-{seed}.pt"
    if kept.is_file():
        return torch.load(kept, weights_only=True)
    num_threads = torch.get_num_threads()
    loaded = load(folder, "model.dtype=float32", f"decode.num_threads={num_threads}")
    bench = Bench(loaded, max_rows=batch, num_pages=batch * 6, page_size=64)
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in tqdm(range(num // batch), desc="continuations"):
        prompts = sample(stream, batch, PROMPT_LENGTH - 1, generator)
        prompts[:, 0] = BOS_ID
        num_new = LENGTH + 1 - PROMPT_LENGTH
        options = [
            greedy(f"r{i}", ids, num_new, ignore_eos=True) for i, ids in enumerate(prompts.tolist())
        ]
        answers = bench.generate(*options)
        texts += [
            [*one.prompt_ids, *tokens] for one, (tokens, _) in zip(options, answers, strict=True)
        ]
    torch.set_num_threads(num_threads)  # engines with native kernels set it to 1
    CACHE.mkdir(parents=True, exist_ok=True)
    torch.save(torch.tensor(texts), kept)
    return torch.tensor(texts)


def draft_loss(logits: Tensor, teacher: Tensor, best: Tensor) -> Tensor:
    """Return the cross-entropy of drafts to the main model, averaged over all positions.

    Args:
        logits: Logits [.., V] of drafts.
        teacher: The main model's distribution [.., V], with weight SOFT_SHARE in the target.
        best: The main model's most likely token [.., 1], with the remaining weight.
    """
    choice = logits.gather(-1, best).squeeze(-1)
    goal = SOFT_SHARE * (teacher * logits).sum(-1) + (1 - SOFT_SHARE) * choice
    return (logits.logsumexp(-1) - goal).mean()


def chain_losses(
    network: Network, drafts: Callable[[Tensor, Tensor], list[Tensor]], windows: Tensor
) -> Tensor:
    """Return the loss of each draft in nats per token, against the frozen main model.

    Args:
        network: The main model.
        drafts: Function of tokens and hidden states. It returns logits [B, R, V] of each draft;
            row i of draft k is for position i + k.
        windows: Token ids [B, T + 1].
    """
    tokens = windows[:, :-1]
    with torch.no_grad():
        out = network(tokens)
        best, teacher = out.logits.argmax(-1, keepdim=True), out.logits.softmax(-1)
    values = []
    for k, logits in enumerate(drafts(tokens, out.hidden), 1):
        rows = slice(k, k + logits.shape[1])
        values.append(draft_loss(logits, teacher[:, rows], best[:, rows]))
    return torch.stack(values)


NO_MATRIX = "mlp.gate.weight", "lm_head.weight", "embed_tokens.weight"


def draft_optimizers(trained: nn.Module, muon_lr: float, adam_lr: float) -> list:
    """Create optimizers for all parameters that require gradients.

    Muon updates matrices. AdamW updates norms, biases, gates, embeddings and heads.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in trained.named_parameters():
        small = weight.dim() == 1 or name.endswith(NO_MATRIX)
        if weight.requires_grad:
            (others if small else matrices).append(weight)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, muon_lr), adam]


class TrainingRun:
    """A resumable training run.

    Args:
        trained: Module whose parameters are saved.
        losses: Function that returns the losses of windows [B, T + 1]; their mean is minimised.
        optimizers: Optimizers of the trained parameters.
        texts: Texts to train on.
        arguments: Options of ``add_schedule``, which must be the same when the run is resumed.

    Attributes:
        num_done: Number of completed steps.
        seconds: Time spent in steps.
        history: One record per ten steps.
    """

    def __init__(
        self,
        trained: nn.Module,
        losses: Callable[[Tensor], Tensor],
        optimizers: list,
        texts: TrainingSetup,
        arguments: argparse.Namespace,
    ) -> None:
        self._trained, self._losses, self._optimizers = trained, losses, optimizers
        self._texts, self._num_steps = texts, arguments.num_steps
        options = {"model": texts.digest} | {k: str(v) for k, v in sorted(vars(arguments).items())}
        self._options = json.dumps(options)
        self._file = arguments.state / "state.pt"
        self._generator = torch.Generator().manual_seed(arguments.seed)
        self._peaks = [group["lr"] for group in self._groups]
        self.num_done, self.seconds = 0, 0.0
        self.history: list[dict] = []

    @property
    def _groups(self) -> list[dict]:
        """Parameter groups of all optimizers. Loading a state replaces them."""
        return [group for one in self._optimizers for group in one.param_groups]

    def run(self) -> "TrainingRun":
        """Run to the end, from the saved state if there is one."""
        if self._file.is_file():
            self._resume()
        with tqdm(total=self._num_steps, initial=self.num_done, unit="step") as bar:
            while self.num_done < self._num_steps:
                values = self._step()
                bar.update()
                if self.num_done % 10 == 0:
                    self.history.append({"step": self.num_done, "drafts": values})
                    bar.set_postfix(losses=[round(value, 3) for value in values])
                if self.num_done % SAVE_EVERY == 0 or self.num_done == self._num_steps:
                    self._save()
        return self

    def _step(self) -> list[float]:
        started, done = time.monotonic(), self.num_done / self._num_steps
        rate = min(1 - done, (self.num_done + 1) / WARMUP_STEPS)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = rate * peak
        own, generator = self._texts.continuations, self._generator
        if self.num_done % 2:
            windows = sample(self._texts.stream, *CORPUS_BATCH, generator)
        else:
            windows = own[torch.randint(len(own), (CONTINUATION_BATCH,), generator=generator)]
        values = self._losses(windows)
        values.mean().backward()
        weights = [weight for group in self._groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.num_done += 1
        self.seconds += time.monotonic() - started
        return values.tolist()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "trained": self._trained.state_dict(),
            "optimizers": [one.state_dict() for one in self._optimizers],
            "generator": self._generator.get_state(),
            "position": (self.num_done, self.seconds),
            "asked": self._options,
            "history": self.history,
        }
        torch.save(state, self._file.with_suffix(".tmp"))
        self._file.with_suffix(".tmp").replace(self._file)
        report = {"seconds": self.seconds, "history": self.history}
        self._file.with_name("history.json").write_text(json.dumps(report), encoding="utf-8")

    def _resume(self) -> None:
        state = torch.load(self._file, weights_only=True)
        if state["asked"] != self._options:
            raise ValueError(
                f"--state={self._file.parent}: is of a run that was asked for {state['asked']}; "
                "give another folder, or remove it"
            )
        self._trained.load_state_dict(state["trained"])
        for optimizer, value in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        self._generator.set_state(state["generator"])
        self.num_done, self.seconds = state["position"]
        self.history = state["history"]


def write_report(run: TrainingRun, folder: Path, **more: object) -> None:
    """Write training.json and training.png (losses), which describe the run, to ``folder``.

    ``more`` is added to training.json.
    """
    from matplotlib.figure import Figure

    report = {"minutes": round(run.seconds / 60, 1), "steps": run.num_done, **more}
    name = Path(sys.argv[0]).stem
    report["command"] = " ".join([f"python -m training.{name}", *sys.argv[1:]])
    report = json.loads(json.dumps(report), parse_float=lambda text: round(float(text), 4))
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    # The mean of 8 records smooths the losses. Records with fewer losses than others are padded.
    records = [torch.tensor(record["drafts"]) for record in run.history]
    losses = pad_sequence(records, batch_first=True, padding_value=torch.nan)
    for i, values in enumerate(losses.unfold(0, 8, 1).mean(-1).T.tolist(), 1):
        axes.plot([10 * (8 + k) for k in range(len(values))], values, label=f"step {i}")
    axes.set(xlabel="steps of 4,096 tokens", ylabel="loss, mean of 8 records")
    axes.legend()
    figure.savefig(folder / "training.png", dpi=90)


def add_rates(parser: argparse.ArgumentParser, muon: float, adam: float) -> None:
    """Add the options of ``draft_optimizers`` to a command line, with these defaults."""
    parser.add_argument("--muon-lr", type=float, default=muon, help="peak rate of the matrices")
    text = "peak rate of norms, biases, gates, embeddings and heads"
    parser.add_argument("--adam-lr", type=float, default=adam, help=text)


def add_schedule(parser: argparse.ArgumentParser, name: str, num_steps: int) -> None:
    """Add the options of a TrainingRun to a command line.

    ``name`` is the default folder of the state within CACHE.
    """
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path(__file__).parent / "tiny-v3", help="main model")
    add("--state", type=Path, default=CACHE / name, help="folder to go on from, outside git")
    add("--num-steps", type=int, default=num_steps, help="of 4,096 tokens")
    add("--share", type=float, default=1.0, help="of all texts that are used")
    add("--continuations", type=int, default=1024, help="number of greedy continuations")
    add("--batch", type=int, default=32, help="continuations generated at a time")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=1, help="seed of prompts and sampling")
