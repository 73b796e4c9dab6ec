"""Random tiny DeepSeek-V3 checkpoints on disk, and transformers' results for them.

Every norm and bias is random, so that no mistake can hide behind ones and zeros.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tandem.model.checkpoint.config import ModelConfig

BASE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_tiny(
    folder: Path, *, seed: int, num_mtp_layers: int | None = None, **overrides: Any
) -> ModelConfig:
    """Write config.json and model.safetensors.

    ``num_mtp_layers`` writes fewer MTP layers than config.json promises, as in re-quantised copies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | overrides))
    config = ModelConfig.from_dir(folder)
    save_file(random_tensors(config, seed, num_mtp_layers), folder / "model.safetensors")
    return config


def random_tensors(
    config: ModelConfig, seed: int, num_mtp_layers: int | None = None
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by their names on disk, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    num_mtp_layers = config.num_nextn_predict_layers if num_mtp_layers is None else num_mtp_layers
    num_layers = config.num_hidden_layers + num_mtp_layers
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
    }
    for i in range(num_layers):
        shapes |= layer_shapes(config, i)
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    c, dim, prefix = config, config.hidden_size, f"model.layers.{layer}."
    q_dim = c.num_attention_heads * c.qk_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
        "self_attn.kv_a_proj_with_mqa.weight": (c.latent_dim, dim),
        "self_attn.kv_a_layernorm.weight": (c.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (
            c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
            c.kv_lora_rank,
        ),
        "self_attn.o_proj.weight": (dim, c.num_attention_heads * c.v_head_dim),
    }
    if c.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (q_dim, dim)
    else:
        shapes["self_attn.q_a_proj.weight"] = (c.q_lora_rank, dim)
        shapes["self_attn.q_a_layernorm.weight"] = (c.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (q_dim, c.q_lora_rank)
    shapes |= moe_shapes(c) if c.is_moe_layer(layer) else mlp("mlp", dim, c.intermediate_size)
    if layer >= c.num_hidden_layers:
        shapes |= {"enorm.weight": (dim,), "hnorm.weight": (dim,), "eh_proj.weight": (dim, 2 * dim)}
        shapes["shared_head.norm.weight"] = (dim,)
    return {prefix + name: shape for name, shape in shapes.items()}


def moe_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    dim, width = config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (config.n_routed_experts, dim)}
    if config.topk_method == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    for e in range(config.n_routed_experts):
        shapes |= mlp(f"mlp.experts.{e}", dim, width)
    if config.n_shared_experts:
        shapes |= mlp("mlp.shared_experts", dim, width * config.n_shared_experts)
    return shapes


def mlp(prefix: str, dim: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, dim),
        f"{prefix}.up_proj.weight": (width, dim),
        f"{prefix}.down_proj.weight": (dim, width),
    }


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1 and "norm" in name:
        return torch.rand(shape, generator=generator) + 0.5
    if name.endswith("e_score_correction_bias"):
        return torch.randn(shape, generator=generator) * 0.3
    gain = 3.0 if name.startswith("lm_head") else 1.5
    return torch.randn(shape, generator=generator) * gain * shape[-1] ** -0.5


@lru_cache(maxsize=4)
def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return transformers' model of the checkpoint. Its MTP keys are renamed so that transformers
    finds them (docs/concepts/model.md)."""
    config = ModelConfig.from_dir(folder)
    first, num_mtp_layers = config.num_hidden_layers, config.num_nextn_predict_layers
    patterns = [rf"model\.layers\.{i}\..*" for i in range(first, first + num_mtp_layers)]
    DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected = patterns
    # torch's grouped product, which transformers prefers for experts, has no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts)
    return model.eval()


@torch.no_grad()
def reference_logits(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits [T, V] of transformers."""
    return reference(folder, dtype)(torch.tensor([ids])).logits[0]


@torch.no_grad()
def reference_greedy(folder: Path, ids: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation by transformers, ignoring EOS."""
    output = reference(folder).generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(ids) :].tolist()


@torch.no_grad()
def reference_mtp(folder: Path, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return MTP rows 0 .. T-2 over (token i+1, hidden i): normed hidden [T-1, D], logits [T-1,
    V]."""
    main = reference(folder)
    mtp = MtpModel.from_pretrained(main).eval()
    cache = MtpCache(config=main.config.get_mtp_config())
    tokens = torch.tensor([ids])
    hidden = main.model(tokens).last_hidden_state
    positions = torch.arange(1, len(ids)).unsqueeze(0)
    output = mtp.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=tokens[:, 1:])
    return output[0], mtp._project_to_logits(output)[0]
