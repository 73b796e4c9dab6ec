"""Writes a trained network as a Hugging Face checkpoint folder."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.corpus import BOS_ID, EOS_ID
from training.model import Network
from training.network import NetworkConfig
from training.tokenizer import save_tokenizer

_FP32_SUFFIX = "e_score_correction_bias"


def hf_config(c: NetworkConfig) -> dict:
    """Return the content of config.json, with all relevant fields of DeepSeek-V3's."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **asdict(c),
        "num_key_value_heads": c.num_attention_heads,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def checkpoint_tensors(network: Network) -> dict[str, Tensor]:
    """Return all tensors by checkpoint name, in bf16, except the routing biases in fp32."""
    tensors = layer_tensors(network)
    mtp = f"model.layers.{network.config.num_hidden_layers}"
    tensors[f"{mtp}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{mtp}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def layer_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a module by checkpoint name; ``prefix`` is prepended to the names."""
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict(prefix=prefix).items():
        before, stacked, projection = name.partition(".experts.")
        if stacked:
            for index, matrix in enumerate(value):
                tensors[f"{before}.experts.{index}.{projection}.weight"] = matrix
        else:
            tensors[name] = value
    return {name: _stored(name, value) for name, value in tensors.items()}


def _stored(name: str, value: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith(_FP32_SUFFIX) else torch.bfloat16
    return value.detach().to(dtype, copy=True).contiguous()


def load_tensors(network: Network, tensors: dict[str, Tensor]) -> None:
    """Copy checkpoint tensors into a network (the inverse of checkpoint_tensors)."""
    state = {}
    for name, value in network.state_dict().items():
        prefix, stacked, projection = name.partition(".experts.")
        if stacked:
            names = [f"{prefix}.experts.{i}.{projection}.weight" for i in range(len(value))]
            state[name] = torch.stack([tensors[expert] for expert in names]).float()
        else:
            state[name] = tensors[name].float()
    network.load_state_dict(state)


def _write_json(path: Path, value: dict) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def export(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, configuration and, unless it exists, the tokenizer.

    Files of weights and configuration are replaced atomically.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer_config.json").exists():
        save_tokenizer(tokenizer, folder)
    _write_json(folder / "config.json", hf_config(network.config))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)
    temporary = folder / "model.safetensors.tmp"
    save_file(checkpoint_tensors(network), temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, folder / "model.safetensors")
