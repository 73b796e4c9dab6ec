"""Trains EAGLE heads for a finished checkpoint, which is not changed.

    python -m training.eagle --method eagle | hass | eagle3

eagle (arXiv 2401.15077): SmoothL1 loss of the next feature, and cross-entropy of its token with
weight 0.1.

hass (2408.15766): the same over 3 steps, each fed with the output of the previous one (context
alignment). Adds cross-entropy over the 10 most likely tokens (top-k distillation).

eagle3 (2503.01840): cross-entropy over 7 such steps, without a loss of features (training-time
test). The first half of the run trains one step only: later steps are learned quickly, and training
them triples the time.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from training.eagle_network import Head, HeadConfig
from training.evaluate import held_out_windows, measure_drafts
from training.model import Network, TrunkOutput
from training.tuning import (  # fmt: skip
    CONTINUATION_BATCH,
    LENGTH,
    TrainingRun,
    TrainingSetup,
    add_rates,
    add_schedule,
    draft_optimizers,
    load_setup,
    write_report,
)

STEPS = {"eagle": 1, "hass": 3, "eagle3": 7}
MUON = {"eagle": 8e-3, "hass": 8e-3, "eagle3": 16e-3}
TOKEN_WEIGHT, TOP_WEIGHT, NUM_TOP, DECAY = 0.1, 1.0, 10, 0.8


def feature_loss(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the SmoothL1 loss, averaged over values and positions."""
    return F.smooth_l1_loss(made, wanted)


def token_loss(logits: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the cross-entropy to the teacher's distribution [.., U], averaged over positions.

    Positions outside ``mask`` count as 0.
    """
    each = -(teacher * logits.log_softmax(-1)).sum(-1)
    return (each if mask is None else each * mask).mean()


def top_loss(logits: Tensor, teacher: Tensor, num: int = NUM_TOP) -> Tensor:
    """Return the cross-entropy over the teacher's ``num`` most likely tokens (HASS)."""
    shares, tokens = teacher.topk(num, dim=-1)
    return -(shares * logits.log_softmax(-1).gather(-1, tokens)).sum(-1).mean()


def taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 reads.

    The last of them is the last layer. EAGLE-3's authors use the third last of their models, which
    have dozens of layers.
    """
    return 2, num_layers // 2, num_layers - 1


def head_losses(
    network: Network, head: Head, num_steps: int, top_weight: float, windows: Tensor
) -> Tensor:
    """Return the weighted loss of each unrolled step."""
    tokens = windows[:, :-1]
    rows, has_taps = tokens.shape[1] - num_steps, head.config.has_taps
    out, features = read(network, head, tokens)
    told = out.logits[..., head.ids_U] if has_taps else out.logits
    known, teachers = torch.isin(out.logits.argmax(-1), head.ids_U), told.softmax(-1)
    values = []
    for k, made in enumerate(head.unrolled(network, tokens, features, num_steps)):
        at, logits = slice(k + 1, k + 1 + rows), head.logits(network, made)
        teacher = teachers[:, at]
        if has_taps:
            values.append(DECAY**k * token_loss(logits, teacher, known[:, at]))
            continue
        value = feature_loss(made, out.hidden[:, at]) + TOKEN_WEIGHT * token_loss(logits, teacher)
        values.append(value + top_weight * top_loss(logits, teacher) if top_weight else value)
    return torch.stack(values)


def agreement(
    network: Network, head: Head, windows: Tensor, num_steps: int = 3
) -> tuple[list[float], float]:
    """Return the agreement of drafts with the main model, see evaluate.measure_drafts."""

    def predict(tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        out, features = read(network, head, tokens)
        made = head.unrolled(network, tokens, features, num_steps)
        choices = [head.logits(network, one).argmax(-1) for one in made]
        if head.config.has_taps:
            choices = [head.ids_U[one] for one in choices]
        return out.logits.argmax(-1), choices

    return measure_drafts(windows, predict)


def read(network: Network, head: Head, tokens: Tensor) -> tuple[TrunkOutput, Tensor]:
    """Return the frozen main model's output and the features that the head reads."""
    has_taps = head.config.has_taps
    with torch.no_grad():
        out = network(tokens, taps(network.config.num_hidden_layers) if has_taps else ())
    return out, torch.cat(out.tapped, -1) if has_taps else out.hidden


def frequent(texts: TrainingSetup, num: int) -> Tensor:
    """Return the ``num`` most frequent tokens of the training texts, in ascending order."""
    counts = torch.bincount(texts.stream, minlength=texts.network.config.vocab_size)
    counts += torch.bincount(texts.continuations.flatten(), minlength=len(counts))
    ids = counts.topk(num).indices.sort().values
    print(f"{num} tokens are {counts[ids].sum() / counts.sum():.4f} of all text", flush=True)
    return ids


def save(head: Head, network: Network, folder: Path) -> None:
    """Write a head with the tensor names of EAGLE's authors.

    The layer is ``midlayer`` in EAGLE-3 and ``layers.0`` otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    c, has_taps = head.config, head.config.has_taps
    weights = head.state_dict() | {"fc.weight": head.fc.weight * head.scale_F}
    tensors = {name: one.detach().bfloat16().contiguous() for name, one in weights.items()}
    if not has_taps:
        tensors = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if has_taps else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": network.config.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "hidden_act": "silu",
        "bias": not has_taps,
    }
    if has_taps:
        ids_U = head.ids_U
        tensors["d2t"] = ids_U - torch.arange(len(ids_U))
        tensors["t2d"] = torch.isin(torch.arange(c.vocab_size), ids_U)
        config |= {
            "draft_vocab_size": len(ids_U),
            "eagle_aux_hidden_state_layer_ids": list(taps(network.config.num_hidden_layers)),
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--method", choices=STEPS, required=True)
    method = parser.parse_known_args(given)[0].method
    add_schedule(parser, method, num_steps=930)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / f"tiny-v3-{method}",
        help="folder of the head",
    )
    add("--num-unrolled", type=int, default=STEPS[method], help="steps fed with one another")
    text = (
        "the run's first steps, which learn one draft; by default half of eagle3's, none of others"
    )
    add("--num-plain", type=int, help=text)
    add(
        "--top-weight",
        type=float,
        default=TOP_WEIGHT * (method == "hass"),
        help="of top-k distillation",
    )
    add_rates(parser, muon=MUON[method], adam=3e-3)
    arguments = parser.parse_args(given)
    if arguments.num_plain is None:
        arguments.num_plain = arguments.num_steps // 2 if method == "eagle3" else 0
    return arguments


def main() -> None:
    """Train a head and print how often each draft is right on held-out text afterwards."""
    arguments = parse_arguments()
    texts = load_setup(arguments)
    network, has_taps = texts.network, arguments.method == "eagle3"
    of = network.config
    config = HeadConfig(of.hidden_size, of.vocab_size, has_taps)
    ids_U = frequent(texts, config.draft_vocab_size) if has_taps else torch.arange(0)
    head = Head(config, network, ids_U, arguments.seed)
    if has_taps:
        head.rescale(read(network, head, texts.continuations[:CONTINUATION_BATCH, :-1])[1])
    held_out = held_out_windows(texts.tokenizer, LENGTH, 64)
    optimizers = draft_optimizers(head, arguments.muon_lr, arguments.adam_lr)

    def losses(windows: Tensor) -> Tensor:
        num_steps = 1 if run.num_done < arguments.num_plain else arguments.num_unrolled
        return head_losses(network, head, num_steps, arguments.top_weight, windows)

    run = TrainingRun(head, losses, optimizers, texts, arguments)
    run.run()
    shares, length = agreement(network, head, held_out)
    print("after", shares, length, f"{run.seconds / 60:.0f} min", flush=True)
    save(head, network, arguments.out)
    write_report(run, arguments.out, right_behind_true_text=shares, tokens_behind_true_text=length)


if __name__ == "__main__":
    main()
