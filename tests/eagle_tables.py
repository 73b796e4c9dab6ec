"""Compute tests/data/eagle*.safetensors with the authors' own code, for random heads.

    python -m tests.eagle_tables WHEELS

WHEELS is a folder with eagle_llm-1.2.1, specforge-0.2.0 and speculators-0.9.0 unpacked, as written
by ``pip download --no-deps`` and ``unzip``. Their requirements conflict with ours and with each
other. So single files are read, and their other imports are stubbed.
"""

import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig

DATA = Path(__file__).with_name("data")
NUM_ROWS, NUM_STEPS = 9, 4
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 96,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
}


def randomised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.named_parameters():
        drawn = torch.randn(tensor.shape, generator=generator)
        is_norm = tensor.dim() == 1 and "norm" in name
        scale = 0.3 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
        tensor.data = drawn.abs() * 0.5 + 0.5 if is_norm else drawn * scale
    return module.eval()


def inputs(num_features: int) -> tuple[Tensor, Tensor]:
    """Return token ids [1, T + steps] and features [1, T, F]."""
    generator = torch.Generator().manual_seed(77)
    ids = torch.randint(5, 90, (1, NUM_ROWS + NUM_STEPS), generator=generator)
    return ids, torch.randn(1, NUM_ROWS, num_features, generator=generator)


def stub(name: str, **contents: Any) -> None:
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(contents)


def module_of(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def causal(num: int) -> Tensor:
    return torch.full((num, num), float("-inf")).triu(1).clamp(min=-1e30)[None, None]


@torch.no_grad()
def eagle_1(wheels: Path) -> dict[str, Tensor]:
    """Run eagle-llm 1.2.1: one pass over T rows, then single rows from its cache. Each is fed with
    the output of the row before. The head has one key-value head per attention head."""
    stub("eagle.model.utils_c")
    folder = wheels / "eagle_llm" / "eagle" / "model"
    source = (folder / "cnets.py").read_text(encoding="utf-8")
    keep = source[: source.index("class Vhead")]
    for line in [
        line for line in keep.splitlines() if line.strip().startswith(("from .", "from try"))
    ]:
        keep = keep.replace(line, line[: len(line) - len(line.lstrip())] + "pass")
    cnets: dict[str, Any] = {"__name__": "cnets"}
    exec(compile(keep, str(folder / "cnets.py"), "exec"), cnets)
    config = LlamaConfig(**SIZES | {"num_key_value_heads": 4, "head_dim": 12, "pad_token_id": 0})
    config.rope_scaling, config.pretraining_tp = None, 1
    model = randomised(cnets["Model"](config, bias=True), 5)
    model.gradient_checkpointing = False
    model.tree_mask = None
    ids, features = inputs(48)
    rows = ids[:, 1 : NUM_ROWS + 1]
    first, cache = model(features, input_ids=rows, use_cache=True)
    later, _ = model(
        first[:, -1:], ids[:, NUM_ROWS + 1 : NUM_ROWS + 2], past_key_values=cache, use_cache=True
    )
    named = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if "rotary" not in name
    }
    told = {"ids": ids, "features": features, "first": first, "later": later}
    return named | {f"told.{name}": tensor for name, tensor in told.items()}


@torch.no_grad()
def eagle_3(wheels: Path, **more: Any) -> dict[str, Tensor]:
    """Run specforge 0.2.0: the first and the later steps of its training-time test."""
    stub(
        "specforge.modeling.draft.flex_attention",
        **dict.fromkeys(
            (
                "compile_friendly_create_block_mask",
                "compile_friendly_flex_attention",
                "generate_eagle3_mask",
            )
        ),
    )
    stub("specforge.utils", print_with_rank=print)
    stub("specforge.distributed", get_sp_ring_group=None, get_sp_ulysses_group=None)
    stub("specforge.modeling._mask_utils", _expand_mask=None, _make_causal_mask=None)
    stub("specforge.modeling.draft.registry", register_draft=lambda cls: cls)
    folder = wheels / "specforge" / "specforge" / "modeling" / "draft"
    module_of(folder / "base.py", "specforge.modeling.draft.base")
    torch.compile = lambda *given, **_: given[0] if given else lambda function: function  # type: ignore[assignment]
    eagle3 = module_of(folder / "llama3_eagle.py", "specforge.modeling.draft.llama3_eagle")
    config = LlamaConfig(**SIZES, draft_vocab_size=40, pad_token_id=0)
    model = randomised(eagle3.LlamaForCausalLMEagle3(config), 6)
    ids_U = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:40].sort().values
    model.d2t.copy_(ids_U - torch.arange(40))
    model.t2d.copy_(torch.isin(torch.arange(96), ids_U))
    ids, features = inputs(3 * 48)
    hidden, cache, told = model.project_hidden_states(features), [[], []], {}
    for step in range(NUM_STEPS):
        rows = ids[:, 1 + step : 1 + step + NUM_ROWS]
        hidden = model.backbone(
            model.embed_input_ids(rows),
            hidden,
            cache,
            causal(NUM_ROWS),
            torch.arange(NUM_ROWS)[None],
        )
        told |= {f"hidden.{step}": hidden, f"logits.{step}": model.compute_logits(hidden)}
    named = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told |= {"ids": ids, "features": features}
    return named | {f"told.{name}": tensor for name, tensor in told.items()}


def losses(wheels: Path) -> dict[str, Tensor]:
    """Compute specforge 0.2.0's EAGLE-3 loss and eagle-llm 1.2.1's EAGLE-1 loss of the same
    tensors.

    The tensors are predicted logits ("said" [1, T, V]), predicted features ("made" [1, T, D]), and
    their targets ("truth" and "wanted").
    """
    generator = torch.Generator().manual_seed(8)
    said, truth, head = (
        torch.randn(1, 20, 40, generator=generator) * 2,
        torch.randn(1, 20, 96, generator=generator) * 2,
        torch.randn(96, 48, generator=generator) / 7,
    )
    made, wanted = torch.randn(2, 1, 20, 48, generator=generator)
    t2d = torch.zeros(96, dtype=torch.bool).index_fill(
        0, torch.randperm(96, generator=generator)[:40], True
    )
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    for file, name in (
        ("algorithms/eagle3/model.py", "_compute_target_p"),
        ("core/loss.py", "_compute_loss"),
    ):
        source = (wheels / "specforge" / "specforge" / file).read_text(encoding="utf-8")
        begin = source.index(f"def {name}(")
        exec(source[begin:].split("\n\n\n")[0].split("\n@torch")[0], names)
    target_p, _, _, mask = names["_compute_target_p"](truth, t2d, torch.ones(1, 20, 1))
    eagle3 = names["_compute_loss"](said, target_p, mask)
    source = (wheels / "eagle_llm" / "eagle" / "train" / "main.py").read_text(encoding="utf-8")
    begin, end = (
        source.index("            with torch.no_grad():\n                target_head"),
        source.index("            # loss.backward()"),
    )
    names |= {
        "head": lambda x: x @ head.T,
        "predict": made,
        "data": {"target": wanted, "loss_mask": torch.ones(1, 20)},
        "criterion": nn.SmoothL1Loss(reduction="none"),
        "train_config": {"p_w": 0.1, "v_w": 1.0},
    }
    exec(textwrap.dedent(source[begin:end]), names)
    told = {"said": said, "truth": truth, "head": head, "made": made, "wanted": wanted, "t2d": t2d}
    return told | {"eagle3": eagle3, "vloss": names["vloss"], "loss": names["loss"]}


def main() -> None:
    wheels = Path(sys.argv[1])
    for name, make in (("eagle1", eagle_1), ("eagle3", eagle_3), ("eagle_losses", losses)):
        save_file(
            {k: v.contiguous() for k, v in make(wheels).items()}, DATA / f"{name}.safetensors"
        )
    print(json.dumps(SIZES))


if __name__ == "__main__":
    main()
