"""The two checkpoints that engines are compared on."""

import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.harness.tiny import BASE, random_tensors
from tandem.core.config import TINY_MODEL
from tandem.model.checkpoint.config import ModelConfig
from training.corpus import held_out_prompts

SHIPPED, RANDOM = "shipped", "random-0.5b"
NAMES = (SHIPPED, RANDOM)
SHAPE: dict[str, Any] = BASE | {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
"""DeepSeek-V3's architecture. The vocabulary is the shipped checkpoint's, whose tokenizer is
used."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. Answers may end at EOS if it ``is_trained``; a random one never ends by
    itself."""

    name: str
    path: Path
    is_trained: bool

    def prompts(self, num: int, num_tokens: int, seed: int) -> list[list[int]]:
        """Return pieces of files that training never saw, or random tokens."""
        if self.is_trained:
            tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
            return held_out_prompts(tokenizer, num, num_tokens, num_tokens, seed)
        rng = random.Random(f"prompts {seed} {num_tokens}")
        vocab = SHAPE["vocab_size"]
        return [[rng.randrange(2, vocab) for _ in range(num_tokens)] for _ in range(num)]


def find(name: str, cache: Path) -> Checkpoint:
    """Return the checkpoint. The random one is written first if it does not exist."""
    if name == SHIPPED:
        return Checkpoint(name, TINY_MODEL, is_trained=True)
    digest = hashlib.blake2b(json.dumps(SHAPE, sort_keys=True).encode(), digest_size=4).hexdigest()
    path = cache / "checkpoints" / f"{name}-{digest}"
    if not path.exists():
        write_random(path, SHAPE)
    return Checkpoint(name, path, is_trained=False)


def write_random(path: Path, shape: dict[str, Any], seed: int = 0) -> None:
    """Write weights as in benchmarks/harness/tiny.py, in bfloat16, atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps(shape, indent=1))
    tensors = random_tensors(ModelConfig.from_dir(part), seed)
    kept = {name: tensor if _stays(name) else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(
        {n: t.contiguous() for n, t in kept.items()}, part / "model.safetensors", {"format": "pt"}
    )
    for file in TOKENIZER_FILES:
        shutil.copy(TINY_MODEL / file, part / file)
    part.rename(path)


def _stays(name: str) -> bool:
    """Return whether a tensor stays float32 on disk, like DeepSeek-V3's routing biases."""
    return name.endswith("e_score_correction_bias")
