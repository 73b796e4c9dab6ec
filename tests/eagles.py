"""EAGLE heads for tests: those of tests/data/eagle*.safetensors written as folders, and random
heads over MLA latents, for checkpoints of benchmarks.harness.tiny."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.eagle_tables import DATA, NUM_STEPS, SIZES
from tests.numerics import network_rounding

LATENTS = {
    "num_attention_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SAID = {
    "eagle1": SIZES | {"num_key_value_heads": 4, "head_dim": 12},
    "eagle3": SIZES | {"draft_vocab_size": 40},
}


def told(kind: str) -> dict[str, Tensor]:
    """Return the inputs and outputs that tests/eagle_tables.py recorded from the authors' code."""
    tensors = load_file(DATA / f"{kind}.safetensors")
    return {name[5:]: one for name, one in tensors.items() if name.startswith("told.")}


def head_rounding(wanted: Tensor) -> float:
    """Return the error bound of a head that is run repeatedly over its own outputs."""
    size = float(wanted.abs().max())
    return network_rounding(NUM_STEPS, SIZES["hidden_size"], size, growth=2)


def head_tensors(kind: str) -> dict[str, Tensor]:
    tensors = load_file(DATA / f"{kind}.safetensors")
    return {name: one for name, one in tensors.items() if not name.startswith("told.")}


def write_head(folder: Path, kind: str, file: str = "model.safetensors", **changed: Any) -> Path:
    """Write a head folder in the format that its authors publish. ``changed`` replaces ``tensors``
    (None leaves one out) or keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = head_tensors(kind)
    for name, value in changed.pop("tensors", {}).items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    config = {name: value for name, value in (SAID[kind] | changed).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def over_latents(kind: str) -> dict[str, Tensor | None]:
    """Return the tensors of a head that has MLA in place of Llama's attention."""
    generator = torch.Generator().manual_seed(12)
    dim_in, prefix = {"eagle1": (48, "layers.0."), "eagle3": (96, "midlayer.")}[kind]
    shapes = {
        "q_a_proj": (20, dim_in),
        "q_a_layernorm": (20,),
        "q_b_proj": (4 * 28, 20),
        "kv_a_proj_with_mqa": (48, dim_in),
        "kv_a_layernorm": (32,),
        "kv_b_proj": (4 * 28, 32),
        "o_proj": (48, 64),
    }
    made: dict[str, Tensor | None] = dict.fromkeys(
        f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo"
    )
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        tensor = drawn.abs() * 0.5 + 0.5 if len(shape) == 1 else drawn * shape[-1] ** -0.5
        made[f"{prefix}self_attn.{name}.weight"] = tensor
    return made
