"""The model's config.json, parsed and validated.

Field names and meanings are those of DeepSeek's config.json. This module imports no torch, because
gateways use it too.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (  # fmt: skip
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from tandem.core.json_file import read_json
from tandem.model.checkpoint.config_keys import (
    QUANTIZATION,
    ROPE,
    JsonObject,
    find_unsupported,
    normalize_keys,
)
from tandem.model.checkpoint.eos import read_eos, usable_ids

_UNSUPPORTED_MODELS = {
    "deepseek_v32": "it needs sparse attention (DSA), which is not implemented",
    "deepseek_v4": "it is a different architecture (compressed KV, hyper-connections)",
    "glm": "the GLM family is not supported, even with MLA attention",
    "kimi_k25": "it nests a vision model around its int4 text model",
}
_V2 = "deepseek_v2"
_GREEDY = "greedy"
_ROUTINGS = {_V2: ("softmax/greedy", "softmax/group_limited_greedy")}
# Defaults by architecture, for keys that config.json lacks. transformers never writes the two keys
# of V3.
_V2_DEFAULTS = {"scoring_func": "softmax", "topk_method": _GREEDY, "norm_topk_prob": False}
_V3_DEFAULTS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_WITHOUT_GROUPS = {"n_group": 1, "topk_group": 1}
# Increase when the cache format or the arithmetic changes, because ranks of different versions must
# not exchange caches.
_IDENTITY_VERSION = 2
# Fields that do not change any cached value, so two nodes may differ in them.
_IDENTITY_EXCLUDES = ("dtype", "eos_token_ids", "quantization")
_EOS = Field(validation_alias="eos_token_id")
_REMEDIES = {
    "attention_bias": ["linear layers with bias are not implemented"],
    "moe_layer_freq": ["like transformers, Tandem implements only this value"],
    "mlp_bias": ["linear layers with bias are not implemented"],
    "quantization_config": ["use DeepSeek's fp8 format (e4m3 with block scales), or bf16 weights"],
    "rope_scaling": ["only types yarn (without attention_factor) and default are implemented"],
}

# All of torch's names of each dtype, because transformers accepts any of them.
_DTYPES = {
    **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
    **{"half": "float16", "float": "float32", "double": "float64"},
}
PositiveInt = Annotated[StrictInt, Field(ge=1)]
PositiveFloat = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"],
    BeforeValidator(lambda name: _DTYPES.get(str(name).removeprefix("torch."), name)),
]
NonNegativeInt = Annotated[StrictInt, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Parameters of YaRN (arXiv:2309.00071), as in the section rope_scaling of config.json.

    ``mscale`` and ``mscale_all_dim`` are 0 if the file lacks them.
    """

    type: Literal["yarn"]
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)] = 0.0
    mscale_all_dim: Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)] = 0.0
    attention_factor: None = None
    truncate: Literal[True] = True

    @model_validator(mode="after")
    def _check_together(self) -> "YarnScaling":
        if bool(self.mscale) != bool(self.mscale_all_dim) and self.mscale != 1:
            raise ValueError(
                f"rope_scaling.mscale = {self.mscale}, rope_scaling.mscale_all_dim = "
                f"{self.mscale_all_dim}: DeepSeek's code and transformers interpret one without "
                "the other differently; set both or neither"
            )
        return self

    def magnitude(self, scale: float) -> float:
        """Return m(factor, scale): 1 for factor <= 1, else 0.1 * scale * ln(factor) + 1."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def cos_sin_factor(self) -> float:
        """Multiplier of cos and sin: m(factor, mscale) / m(factor, mscale_all_dim)."""
        return self.magnitude(self.mscale or 1.0) / self.magnitude(self.mscale_all_dim)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 weights: float8_e4m3fn values, and one fp32 scale for each block of (rows, columns).

    With ``scale_fmt`` ue8m0 the scales are powers of two.
    """

    quant_method: Literal["fp8"]
    weight_block_size: tuple[PositiveInt, PositiveInt]
    fmt: Literal["e4m3"] = "e4m3"
    scale_fmt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Configuration of a DeepSeek-family model. Fields are named as in config.json.

    Attributes:
        num_hidden_layers: Number L of main-model layers, without MTP layers.
        num_nextn_predict_layers: Number of MTP layers, whose layer ids are L, L + 1, ...
        q_lora_rank: Width of the compressed queries, None if the model has a single q_proj.
        lora_norm_eps: Epsilon of q_a_layernorm and kv_a_layernorm: 1e-6 in all models, independent
            of ``rms_norm_eps``.
    """

    model_type: Literal["deepseek_v3", "deepseek_v2", "kimi_k2"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_nextn_predict_layers: NonNegativeInt = 0
    num_attention_heads: PositiveInt
    q_lora_rank: Annotated[NonNegativeInt, AfterValidator(lambda n: n or None)] | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: Annotated[StrictInt, Field(ge=2, multiple_of=2)]
    v_head_dim: PositiveInt
    first_k_dense_replace: NonNegativeInt
    moe_layer_freq: Literal[1] = 1
    n_routed_experts: PositiveInt
    n_shared_experts: NonNegativeInt
    num_experts_per_tok: PositiveInt
    n_group: PositiveInt
    topk_group: PositiveInt
    scoring_func: str
    topk_method: str
    norm_topk_prob: StrictBool
    routed_scaling_factor: PositiveFloat
    rms_norm_eps: PositiveFloat
    rope_theta: Annotated[StrictFloat, Field(gt=1, allow_inf_nan=False)]
    rope_interleave: StrictBool = True
    max_position_embeddings: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: StrictBool = False
    eos_token_ids: Annotated[tuple[NonNegativeInt, ...], _EOS]
    yarn: Annotated[YarnScaling | None, Field(validation_alias="rope_scaling")] = None
    quantization: Annotated[Fp8Blocks | None, Field(validation_alias=QUANTIZATION)] = None
    dtype: Dtype = "bfloat16"
    lora_norm_eps: float = Field(default=1e-6, init=False)

    @classmethod
    def from_dir(cls, path: str | Path, ignored: tuple[str, ...] = ()) -> "ModelConfig":
        """Read the config of the checkpoint in folder ``path``.

        End-of-sequence tokens come from other files of the folder too. ``ignored`` are the keys in
        the setting ``model.ignore_config_keys``. Raises ValueError for keys that are missing,
        wrong, unknown or unsupported; the message names file, key, value and remedy of each.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; is this the folder of a checkpoint?")
        raw = read_json(file)
        eos = {"eos_token_id": read_eos(Path(path), raw)}
        return cls.from_dict(raw | eos, origin=str(file), ignored=ignored)

    @classmethod
    def from_dict(
        cls, raw: JsonObject, origin: str = "config.json", ignored: tuple[str, ...] = ()
    ) -> "ModelConfig":
        """Build the config from a parsed config.json. Errors name ``origin`` as the file."""
        normalized = normalize_keys(raw)
        problems = [*normalized.problems, *find_unsupported(normalized, USED_KEYS, ignored)]
        try:
            config = cls(**_arguments(normalized.values, origin))
        except ValidationError as error:
            details = [dict(detail) for detail in error.errors()]
            of_type = [detail for detail in details if detail["loc"] == ("model_type",)]
            # If the model is unsupported, errors about other keys would only distract.
            found = [_problem(detail, normalized.names) for detail in of_type or details]
            problems = found if of_type else found + problems
        if problems:
            raise ValueError("\n".join(f"{origin}: {problem}" for problem in problems))
        return config

    @model_validator(mode="after")
    def _check_together(self) -> "ModelConfig":
        """Validate combinations of fields."""
        num_layers = self.num_hidden_layers
        num_chosen = self.num_experts_per_tok
        is_v2 = self.model_type == _V2
        routing = f"{self.scoring_func}/{self.topk_method}"
        routings = _ROUTINGS.get(self.model_type, ("sigmoid/noaux_tc",))
        if routing not in routings:
            raise ValueError(
                f"scoring_func/topk_method = {routing}: model_type = {self.model_type} supports "
                f"only {' or '.join(routings)}"
            )
        is_greedy = self.topk_method == _GREEDY
        num_experts = self.n_routed_experts
        num_groups, num_kept = (1, 1) if is_greedy else (self.n_group, self.topk_group)
        per_group, rest = divmod(num_experts, num_groups)
        is_too_small = self.topk_method == "noaux_tc" and num_groups > 1 and per_group < 2
        eligible = per_group * num_kept
        of_all = (
            f"the number of experts in topk_group = {num_kept} of n_group = {num_groups} groups"
        )
        for name, is_wrong, remedy in (
            ("hidden_size", self.hidden_size % 8, "must be a multiple of 8"),
            ("moe_intermediate_size", self.moe_intermediate_size % 8, "must be a multiple of 8"),
            ("n_group", rest, f"must divide n_routed_experts = {num_experts}"),
            ("n_group", is_too_small, "each group must have at least two experts"),
            ("topk_group", num_kept > num_groups, f"must be <= n_group = {num_groups}"),
            ("num_experts_per_tok", num_chosen > eligible, f"must be <= {eligible}, {of_all}"),
            (
                "first_k_dense_replace",
                self.first_k_dense_replace > num_layers,
                f"must be <= num_hidden_layers = {num_layers}",
            ),
            (
                "norm_topk_prob",
                is_v2 and self.norm_topk_prob,
                f"must be false with model_type = {_V2}",
            ),
            (
                "rope_interleave",
                is_v2 and not self.rope_interleave,
                f"must be true with model_type = {_V2}",
            ),
        ):
            if is_wrong:
                raise ValueError(f"{name} = {getattr(self, name)}: {remedy}")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Number of values cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Multiplier of attention scores, including YaRN's magnitude."""
        yarn = self.yarn
        magnitude = 1.0 if yarn is None else yarn.magnitude(yarn.mscale_all_dim)
        return self.qk_head_dim**-0.5 * magnitude**2

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether decoder layer ``layer`` has experts. MTP layers always do."""
        return layer >= min(self.first_k_dense_replace, self.num_hidden_layers)

    def moe_layer(self, layer: int) -> int | None:
        """Return the index of a decoder layer among the MoE layers, None if it is dense."""
        return sum(map(self.is_moe_layer, range(layer))) if self.is_moe_layer(layer) else None

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers of the main model and the MTP layers."""
        num_layers = self.num_hidden_layers + self.num_nextn_predict_layers
        return sum(map(self.is_moe_layer, range(num_layers)))

    def identity(self) -> str:
        """Return a digest of all fields that determine cached KV values.

        Ranks that exchange caches must have equal digests. The digest covers neither the weights
        nor the dtype of the cache; the cache layout states the dtype.
        """
        shape = {
            name: value for name, value in asdict(self).items() if name not in _IDENTITY_EXCLUDES
        }
        text = json.dumps([_IDENTITY_VERSION, shape], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _keys(of: type) -> list[str]:
    """Return the keys of config.json that set the fields of a dataclass."""
    fields = of.__pydantic_fields__.items()  # type: ignore[attr-defined]
    return [
        str(field.validation_alias or name) for name, field in fields if field.init is not False
    ]


USED_KEYS = frozenset(
    (
        *_keys(ModelConfig),
        *(f"{ROPE}.{key}" for key in _keys(YarnScaling)),
        *(f"{QUANTIZATION}.{key}" for key in _keys(Fp8Blocks)),
    )
)
"""Keys of config.json that Tandem reads."""


def _arguments(values: JsonObject, origin: str) -> dict[str, Any]:
    """Return the arguments for ModelConfig, with sections as dicts and defaults for missing
    keys."""
    found = {key: values[key] for key in values if key in USED_KEYS and "." not in key}
    for section in (ROPE, QUANTIZATION):
        dotted = [key for key in values if key.startswith(f"{section}.")]
        inside = {key.removeprefix(f"{section}."): values[key] for key in dotted}
        if inside and inside != {"type": "default"}:
            found[section] = inside
    ids = [found.get("eos_token_id")]
    found["eos_token_id"] = usable_ids(ids, values.get("vocab_size"), origin)
    defaults = _V2_DEFAULTS if found.get("model_type") == _V2 else _V3_DEFAULTS
    is_greedy = (defaults | found)["topk_method"] == _GREEDY
    return (_WITHOUT_GROUPS if is_greedy else {}) | defaults | found


def _problem(detail: JsonObject, names: Mapping[str, str]) -> str:
    """Return the message for a validation error, with the key as the file spells it."""
    name = ".".join(map(str, detail["loc"]))
    name = names.get(name, name)
    if detail["type"] == "missing":
        return f"{name} is missing; take config.json from the checkpoint"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    text = f"{name} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    value = str(detail["input"])
    reasons = [reason for prefix, reason in _UNSUPPORTED_MODELS.items() if value.startswith(prefix)]
    return "; ".join([text, *_REMEDIES.get(detail["loc"][0], reasons)])
