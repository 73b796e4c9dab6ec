"""config.json: the values of the supported family are read, all others are rejected by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.tiny import BASE
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.drafters.mtp import MtpLayer
from tandem.model.network.deepseek import DeepseekV3
from tandem.model.network.dispatch.base import Dispatch

V3 = BASE | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def make(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(V3 | changes)


def test_v3_as_published() -> None:
    config = make()
    assert config.latent_dim == 576 and config.qk_head_dim == 192
    assert config.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert [config.is_moe_layer(i) for i in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert config.quantization is not None and config.quantization.weight_block_size == (128, 128)


@pytest.mark.parametrize(
    ("mscale", "factor", "theta", "betas", "scale"),
    [(0.707, 40, 1e4, (32, 1), 0.114721), (1.0, 32, 5e4, (1, 1), 0.130861)],
)
def test_published_softmax_scales(
    mscale: float, factor: float, theta: float, betas: tuple[float, float], scale: float
) -> None:
    """Values of V2-Lite and Kimi-K2 (docs/concepts/model.md, RoPE and YaRN)."""
    yarn = V3["rope_scaling"] | {
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "factor": factor,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
    }
    assert make(rope_scaling=yarn, rope_theta=theta).softmax_scale == pytest.approx(scale, abs=1e-6)


def test_both_spellings_of_rope() -> None:
    nested = {k: v for k, v in V3["rope_scaling"].items() if k != "type"}
    nested |= {"rope_type": "yarn", "rope_theta": 10000.0}
    raw = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta")}
    config = ModelConfig.from_dict(raw | {"rope_parameters": nested})
    assert config.yarn == make().yarn and config.rope_theta == 10000.0


def test_a_null_spelling_does_not_hide_the_other() -> None:
    yarn = V3["rope_scaling"] | {"rope_type": None}
    assert make(rope_scaling=yarn).yarn == make().yarn is not None
    assert make(num_mtp_layers=None).num_nextn_predict_layers == 1
    nested = {"rope_type": "default", "rope_theta": 5e4}
    assert make(rope_theta=None, rope_scaling=None, rope_parameters=nested).rope_theta == 5e4


def test_v3_has_as_many_parameters_as_published() -> None:
    """The main model has 671.026e9 parameters, and the MTP layer has 11.61e9 more."""
    config = make()
    with torch.device("meta"):
        dispatch = Dispatch(config.n_routed_experts)
        built = DeepseekV3(config, dispatch), MtpLayer(config, dispatch)
    counts = [sum(p.numel() for p in module.parameters()) for module in built]
    assert counts[0] == pytest.approx(671.026e9, abs=1e6)
    assert counts[1] == pytest.approx(11.61e9, abs=1e7)


def test_null_and_zero_mean_no_query_compression() -> None:
    assert make(q_lora_rank=None).q_lora_rank is make(q_lora_rank=0).q_lora_rank is None


def test_identity_follows_what_shapes_the_cache() -> None:
    assert make().identity() == make(torch_dtype="float32").identity()
    assert make().identity() != make(rope_theta=5e4).identity()
    assert make().identity() != make(num_hidden_layers=60).identity()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"model_type": "llama"}, "llama"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func"),
        ({"topk_method": "nearest"}, "topk_method"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "rope_scaling"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ({"n_group": 7}, "n_group"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok = 129: must be <= 128"),
        ({"topk_group": 9}, r"topk_group = 9: must be <= n_group = 8"),
        ({"rope_scaling": "yarn"}, r"rope_scaling = .yarn.: input should be a dict"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor is missing"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
            r"config\.json: quantization_config\.weight_block_size\.1 = 0",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make(**changes)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{,")
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_generation_config_adds_eos_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert set(ModelConfig.from_dir(tmp_path).eos_token_ids) == {1, 7}
