"""Keys of config.json: an unread key is known to be harmless, or all such keys are rejected by
name."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, PretrainedConfig

from benchmarks.harness import tiny
from benchmarks.harness.engines import Bench, greedy, load
from tandem.core.config import TINY_MODEL
from tandem.core.config import load as load_config
from tandem.core.info import DECODE
from tandem.core.json_file import read_json
from tandem.core.request import TokenBias
from tandem.model.checkpoint.config import ModelConfig
from tandem.model.loaded import load_model

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
V2 = {
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
}


def make(*ignored: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny.BASE | changes, ignored=ignored)


def without(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({n: v for n, v in (tiny.BASE | changes).items() if n != name})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"swiglu_limit": 7.0}, r"swiglu_limit = 7\.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ({"mlp_layer_types": ["dense"]}, r"mlp_layer_types = \['dense'\]"),
        ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        (
            {"use_qk_norm": True},
            r"use_qk_norm = True \(use_qk_norm = False would not change the model\)",
        ),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"index_topk": 2048}, "index_topk = 2048"),
        ({"lora_norm_eps": 0.1}, "lora_norm_eps"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"ep_size": 4}, r"ep_size = 4 \(ep_size = 1 would"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 1}, r"\(num_attention_heads = 4 would not change the model\)"),
        ({"head_dim": 64}, r"head_dim = 64 \(qk_rope_head_dim = 16"),
        ({"qk_head_dim": 1}, r"\(qk_nope_head_dim \+ qk_rope_head_dim = 28 would"),
        ({"rope_scaling": YARN | {"attn_factor": 0.87}}, r"rope_scaling\.attn_factor = 0\.87"),
        ({"rope_parameters": {"full_attention": {"a": 1}}}, r"rope_parameters\.full_attention"),
        ({"rope_scaling": YARN | {"rope_parameters": {"factor": 4}}}, "rope_scaling.rope_param"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            r"rope_parameters\.partial_rotary_factor = 0\.5",
        ),
        ({"rope_scaling": {"factor": 40}}, r"rope_scaling\.type is missing"),
        ({"rope_scaling": YARN | {"type": "default"}}, r"rope_scaling\.type = 'default'"),
        (
            {"quantization_config": FP8 | {"activation_scheme": "static"}},
            r"quantization_config\.activation_scheme = 'static' \(activation_scheme = 'dynamic'",
        ),
        ({"quantization_config": FP8 | {"kv_cache_scheme": "fp8"}}, "kv_cache_scheme = 'fp8'"),
    ],
)
def test_what_may_change_the_model_is_refused_by_name(
    changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        make(**changes)


def test_all_problems_come_in_one_message() -> None:
    changes = {"swiglu_limit": 7.0, "index_topk": 9, "ep_size": 2, "rope_theta": 0, "dtype": "int8"}
    with pytest.raises(ValueError) as refused:
        make(rope_scaling=YARN | {"attn_factor": 0.87}, **changes)
    told = str(refused.value)
    for name in (*changes, "torch_dtype", "rope_scaling.attn_factor"):
        assert name in told, told
    names = "swiglu_limit, index_topk, ep_size, rope_scaling.attn_factor"
    assert sorted(told.rpartition("=[")[2].rstrip("]").split(", ")) == sorted(names.split(", "))


def test_keys_can_be_ignored_unless_they_are_used() -> None:
    changes = {"swiglu_limit": 7.0, "rope_scaling": YARN | {"attn_factor": 0.87}, "ep_size": 4}
    ignored = ("swiglu_limit", "rope_scaling.attn_factor", "ep_size")
    assert make(*ignored, **changes) == make(rope_scaling=YARN)
    with pytest.raises(ValueError, match="ep_size = 4") as refused:
        make(*ignored[:2], **changes)
    assert "swiglu_limit" not in str(refused.value)
    for name in ("rope_theta", "rope_parameters.factor", "rope_scaling", "torch_dtype"):
        with pytest.raises(ValueError, match=rf"ignore_config_keys=\['{name}'\]: Tandem uses"):
            make(name)


def test_the_key_of_our_config_reaches_the_model(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, seed=8, rope_theta=5e4)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"swiglu_limit": 7.0}))
    sets = [f"model.path={tmp_path}", "model.dtype=float32"]
    with pytest.raises(ValueError, match=r"swiglu_limit = 7\.0"):
        load_model(load_config(None, sets), DECODE)
    sets.append("model.ignore_config_keys=[swiglu_limit]")
    assert load_model(load_config(None, sets), DECODE).config.rope_theta == 5e4


@pytest.mark.parametrize("kind", [DeepseekV2Config, DeepseekV3Config])
def test_what_transformers_saves_is_read(kind: type[PretrainedConfig], tmp_path: Path) -> None:
    """Test every attribute of transformers' configs, written in full as save_pretrained does."""
    raw = tiny.BASE | {"rope_scaling": YARN} | (V2 if kind is DeepseekV2Config else {})
    expected = ModelConfig.from_dict(raw)
    saved = kind(**json.loads(json.dumps(raw)))
    (tmp_path / "config.json").write_text(saved.to_json_string(use_diff=False))
    assert ModelConfig.from_dir(tmp_path) == expected
    saved.save_pretrained(tmp_path)
    assert ModelConfig.from_dir(tmp_path) == expected


def test_harmless_keys_change_nothing() -> None:
    assert (
        make(
            unsloth_fixed=True,
            unsloth_version="2025.1",
            temperature=0.6,
            aux_loss_alpha=0.001,
            seq_aux=True,
            pad_token_id=10**6,
            sliding_window=None,
            pruned_heads={},
            partial_rotary_factor=1.0,
            head_dim=16,
            num_local_experts=8,
            quantization_config=None,
        )
        == make()
    )
    ignored = {"modules_to_not_convert": ["lm_head"], "activation_scheme": "dynamic"}
    assert make(quantization_config=FP8 | ignored) == make(quantization_config=FP8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            r"rope_scaling\.type = 'yarn' and rope_parameters\.rope_type = 'default'",
        ),
        (
            {"rope_scaling": YARN | {"rope_type": "default"}},
            r"rope_scaling\.type = 'yarn' and rope_scaling\.rope_type = 'default'",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8}},
            r"rope_scaling\.factor = 4 and rope_parameters\.factor = 8",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"type": "yarn", "rope_theta": 1e4}},
            r"rope_scaling\.factor = 4: is in only one of",
        ),
        (
            {"rope_theta": None, "rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 5}},
            r"rope_parameters\.rope_theta = 5: is in only one of",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
            r"rope_theta = 10000\.0 and rope_parameters\.rope_theta = 50000\.0",
        ),
        ({"dtype": "bfloat16"}, r"torch_dtype = 'float32'"),
        ({"num_mtp_layers": 2}, r"num_nextn_predict_layers = 1 and num_mtp_layers = 2"),
        ({"num_local_experts": 16}, r"num_local_experts = 16 \(n_routed_experts = 8"),
        ({"rope_scaling": YARN | {"mscale": None}}, r"rope_scaling\.mscale = 0\.0.*set both"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 0, "mscale": 0.7}}, r"mscale_all_dim = 0"),
    ],
)
def test_spellings_of_one_value_have_to_agree(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make(**changes)


def test_the_same_value_may_be_there_in_each_spelling() -> None:
    section = YARN | {"rope_type": "yarn", "rope_theta": 10000}
    plain = make(rope_scaling=YARN)
    assert make(rope_scaling=section, rope_parameters=section) == plain
    assert make(rope_scaling=YARN, rope_parameters=section) == plain
    assert make(rope_scaling=YARN, num_mtp_layers=1, dtype="float32") == plain
    assert without("num_nextn_predict_layers", num_mtp_layers=1) == make()


def test_yarn_that_is_there_twice_gives_transformers_tokens(tmp_path: Path) -> None:
    """vllm-project/vllm and sglang lose YaRN here, because the second section overrides the
    first."""
    section = YARN | {"rope_type": "yarn", "rope_theta": 10000.0}
    tiny.write_tiny(tmp_path, seed=8, rope_scaling=section, rope_parameters=section)
    ids = torch.randint(5, 90, (96,), generator=torch.Generator().manual_seed(2)).tolist()
    [(tokens, _)] = Bench(load(tmp_path)).generate(greedy("r", ids, 8, ignore_eos=True))
    assert tokens == tiny.reference_greedy(tmp_path, ids, 8)


@pytest.mark.parametrize("name", ["n_group", "topk_group", "norm_topk_prob", "n_shared_experts"])
def test_routing_is_not_guessed(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is missing"):
        without(name)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        without(name, model_type="kimi_k2")


def test_groups_are_needed_by_what_uses_them() -> None:
    with pytest.raises(ValueError, match=r"n_group is missing.*\n.*topk_group is missing"):
        ModelConfig.from_dict(tiny.BASE | V2 | {"n_group": None, "topk_group": None})
    greedy_v2 = tiny.BASE | V2 | {"topk_method": "greedy", "num_experts_per_tok": 8}
    assert ModelConfig.from_dict(greedy_v2 | {"n_group": None}).n_group == 1
    assert ModelConfig.from_dict(greedy_v2 | {"n_group": 3}).num_experts_per_tok == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"norm_topk_prob": True},
            "norm_topk_prob = True: must be false with model_type = deepseek_v2",
        ),
        ({"rope_interleave": False}, "rope_interleave = False"),
        (
            {"scoring_func": "sigmoid"},
            "sigmoid/group_limited_greedy: model_type = deepseek_v2 supports",
        ),
        ({"model_type": "deepseek_v3"}, "model_type = deepseek_v3 supports only sigmoid/noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_theta": 1}, "rope_theta = 1"),
        ({"hidden_size": 50}, "hidden_size = 50: must be a multiple of 8"),
        ({"moe_intermediate_size": 26}, "moe_intermediate_size = 26: must be a multiple of 8"),
    ],
)
def test_what_no_reference_computes_is_refused(changes: dict[str, Any], expected: str) -> None:
    """DeepSeek's code and transformers disagree about these configs, or lack such a model."""
    with pytest.raises(ValueError, match=expected):
        make(**(V2 | changes))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "half", "float32", "float", "float64", "double"]
)
def test_types_are_read_as_transformers_reads_them(key: str, name: str) -> None:
    raw = {n: value for n, value in tiny.BASE.items() if n != "torch_dtype"} | {key: name}
    dtype = ModelConfig.from_dict(raw).dtype
    assert f"torch.{dtype}" == str(DeepseekV3Config(**raw).dtype)
    assert ModelConfig.from_dict(raw | {key: f"torch.{name}"}).dtype == dtype


@pytest.mark.parametrize("name", ["auto", "bf16", "int8", "float8_e4m3fn", 16])
def test_types_of_no_weights_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=f"torch_dtype = {name!r}: input should be 'bfloat16'"):
        make(torch_dtype=name)


def folder_with(
    tmp_path: Path, config: Any, generation: Any = None, token: Any = None, **special: Any
) -> Path:
    """Write a folder with the shipped tokenizer, in which token 1 ends a sentence."""
    written = tiny.BASE | {"vocab_size": 2048, "eos_token_id": config}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    return tmp_path


END = "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("told", "expected", "warned"),
    [
        ({"config": 1, "token": "</think>"}, (1,), ""),
        ({"config": None, "generation": [1, 7]}, (1, 7), ""),
        ({"config": 7, "generation": [1, 7]}, (7, 1), ""),
        ({"config": None, "token": END}, (1,), ""),
        ({"config": None, "token": {"content": END}}, (1,), ""),
        ({"config": None, "eos_token": END}, (1,), ""),
        (
            {"config": 1, "generation": [1, 99999]},
            (1,),
            r"\[99999\] ignored: not in the vocabulary of 2048 tokens",
        ),
        ({"config": -1, "token": END}, (1,), r"\[-1\] ignored"),
        ({"config": [2048, -1, 2047]}, (2047,), r"\[2048, -1\] ignored"),
        ({"config": None, "token": "not in the vocabulary"}, (), "no file names"),
        ({"config": None}, (), "no file names an end-of-sequence token"),
    ],
)
def test_the_end_is_found_wherever_a_file_names_it(
    told: dict[str, Any],
    expected: tuple[int, ...],
    warned: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tandem.model.checkpoint")
    config = ModelConfig.from_dir(folder_with(tmp_path, **told))
    assert config.eos_token_ids == expected
    assert len(caplog.records) == bool(warned)
    assert re.search(warned, caplog.text)


@pytest.mark.parametrize("value", ["</s>", [True], [[1]], 1.5])
def test_an_end_that_is_no_id_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        ModelConfig.from_dir(folder_with(tmp_path, value))


def test_an_answer_ends_at_the_token_of_the_tokenizers_config(tmp_path: Path) -> None:
    """Regression test for vllm-project/vllm#1183, where the answer never ended."""
    tiny.write_tiny(tmp_path, seed=8, vocab_size=2048, eos_token_id=None)
    folder_with(tmp_path, config=None, token=END)
    loaded = load(tmp_path)
    assert loaded.config.eos_token_ids == (1,)
    ids = [5, 17, 33]
    [(tokens, reason)] = Bench(loaded).generate(
        greedy("r", ids, 9, logit_bias=(TokenBias(1, 100.0),))
    )
    assert (tokens, reason) == ([1], "stop")


def test_a_key_that_is_there_twice_needs_one_value(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": {"factor": 4, "factor": 40}}')
    with pytest.raises(ValueError, match=r"config\.json: factor occurs twice, as 4 and 40; keep"):
        read_json(file)
    file.write_text('{"a": 1, "b": [{"c": null, "c": null}], "a": 1}')
    assert read_json(file) == {"a": 1, "b": [{"c": None}]}
    file.write_text("{,")
    with pytest.raises(ValueError, match=r"config\.json: is not JSON"):
        read_json(file)
