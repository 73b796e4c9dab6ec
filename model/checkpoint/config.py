"""The checkpoint's own description of the network: config.json, read and checked once.

Field names and meanings are those of DeepSeek's config.json (spec deepseek_v3.md §1, §10). This
module imports no torch: the gateway uses it too.
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
    AliasChoices,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from core.json_file import read_json

_REFUSED = {
    "deepseek_v32": "it needs the sparse-attention (DSA) indexer, which Tandem does not have",
    "deepseek_v4": "it is a different architecture (compressed KV, hyper-connections)",
    "glm": "GLM is another family, even where its attention is MLA",
    "kimi_k25": "it nests a vision model around its int4 text model",
}
_ROUTINGS = ("sigmoid/noaux_tc", "softmax/greedy", "softmax/group_limited_greedy")
# Where a file says nothing these are the architecture's; transformers writes neither for V3.
_OF_V2 = {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
_OF_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# A different cache format or different arithmetic must never meet this one: raise the number.
_IDENTITY_VERSION = 2
# What does not change a single cached value: two nodes may differ in it.
_NOT_IDENTITY = ("dtype", "eos_token_ids", "quantization")
_EOS = Field(validation_alias="eos_token_id")
_NUM_MTP = Field(validation_alias=AliasChoices("num_mtp_layers", "num_nextn_predict_layers"))
_REMEDIES = {
    "attention_bias": ["linear layers with bias are not implemented"],
    "mlp_bias": ["linear layers with bias are not implemented"],
    "quantization_config": ["only DeepSeek's fp8 (e4m3, block scales) is read; bring that or bf16"],
    "rope_scaling": ["only yarn, without attention_factor, and default are implemented"],
}

JsonObject = Mapping[str, Any]
Positive = Annotated[StrictInt, Field(ge=1)]
Amount = Annotated[StrictFloat, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[StrictInt, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's parameters, as in config.json's rope_scaling (spec §3)."""

    type: Literal["yarn"]
    factor: Amount
    original_max_position_embeddings: Positive
    beta_fast: Amount = 32.0
    beta_slow: Amount = 1.0
    mscale: Amount = 1.0
    mscale_all_dim: Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)] = 0.0
    attention_factor: None = None
    truncate: Literal[True] = True

    def magnitude(self, scale: float) -> float:
        """m(factor, scale): 1 for factor <= 1, else 0.1 * scale * ln(factor) + 1 (spec §3)."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by: m(factor, mscale) / m(factor, mscale_all_dim)."""
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Weights stored as float8_e4m3fn with one fp32 scale per block (rows, columns) (spec §6);
    ``scale_fmt`` ue8m0 makes scales powers of two."""

    quant_method: Literal["fp8"]
    weight_block_size: tuple[Positive, Positive]
    fmt: Literal["e4m3"] = "e4m3"
    scale_fmt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V3-family model; fields are named as in config.json.

    `num_hidden_layers` (L) leaves out the `num_nextn_predict_layers` MTP layers, whose layer ids
    are L, L+1, ... `q_lora_rank` None means one q_proj. `lora_norm_eps` is the eps of
    q_a_layernorm and kv_a_layernorm: 1e-6 whatever rms_norm_eps says (spec §3).
    """

    model_type: Literal["deepseek_v3", "deepseek_v2", "kimi_k2"]
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    moe_intermediate_size: Positive
    num_hidden_layers: Positive
    num_nextn_predict_layers: Annotated[Whole, _NUM_MTP] = 0
    num_attention_heads: Positive
    q_lora_rank: Annotated[Whole, AfterValidator(lambda n: n or None)] | None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Annotated[StrictInt, Field(ge=2, multiple_of=2)]
    v_head_dim: Positive
    first_k_dense_replace: Whole
    moe_layer_freq: Positive = 1
    n_routed_experts: Positive
    n_shared_experts: Whole = 0
    num_experts_per_tok: Positive
    n_group: Positive = 1
    topk_group: Positive = 1
    scoring_func: str
    topk_method: str
    norm_topk_prob: StrictBool
    routed_scaling_factor: Amount
    rms_norm_eps: Amount
    rope_theta: Amount
    rope_interleave: StrictBool = True
    max_position_embeddings: Positive
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: StrictBool = False
    eos_token_ids: Annotated[tuple[Whole, ...], _EOS]
    yarn: Annotated[YarnScaling | None, Field(validation_alias="rope_scaling")] = None
    quantization: Annotated[Fp8Blocks | None, Field(validation_alias="quantization_config")] = None
    dtype: Annotated[str, Field(validation_alias=AliasChoices("torch_dtype", "dtype"))] = "bfloat16"
    lora_norm_eps: float = 1e-6

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """The config of the checkpoint in folder `path` (config.json, generation_config.json).

        Raises ValueError naming file, field, value and remedy for what is missing, wrong or beyond
        what Tandem serves.
        """
        file, extra = Path(path) / "config.json", Path(path) / "generation_config.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; is this the folder of a checkpoint?")
        return cls.from_dict(read_json(file), read_json(extra), origin=str(file))

    @classmethod
    def from_dict(
        cls, raw: JsonObject, generation: JsonObject | None = None, origin: str = "config.json"
    ) -> "ModelConfig":
        """As `from_dir`, from the parsed files; `origin` is the file named in errors."""
        try:
            return cls(**_one_spelling(raw, generation or {}))
        except ValidationError as error:
            problem = _problem(dict(error.errors()[0]))
        except ValueError as error:
            problem = str(error)
        raise ValueError(f"{origin}: {problem}")

    @model_validator(mode="after")
    def _check_together(self) -> "ModelConfig":
        """What no field says alone."""
        num_layers, num_chosen = self.num_hidden_layers, self.num_experts_per_tok
        routing = f"{self.scoring_func}/{self.topk_method}"
        if routing not in _ROUTINGS:
            raise ValueError(f"scoring_func/topk_method = {routing}: known are {_ROUTINGS}")
        per_group, rest = divmod(self.n_routed_experts, self.n_group)
        lonely = self.topk_method == "noaux_tc" and self.n_group > 1 and per_group < 2
        eligible = per_group * self.topk_group
        beyond = max(self.eos_token_ids, default=0) >= self.vocab_size
        for name, is_wrong, remedy in (
            ("n_group", rest, f"must divide n_routed_experts = {self.n_routed_experts}"),
            ("n_group", lonely, "each group needs two experts or more (its score sums two)"),
            ("topk_group", self.topk_group > self.n_group, f"must be <= n_group = {self.n_group}"),
            ("num_experts_per_tok", num_chosen > eligible, f"must be <= {eligible}, the eligible"),
            ("first_k_dense_replace", self.first_k_dense_replace > num_layers, "beyond the layers"),
            ("eos_token_ids", beyond, f"must be < vocab_size = {self.vocab_size}"),
        ):
            if is_wrong:
                raise ValueError(f"{name} = {getattr(self, name)}: {remedy}")
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by, YaRN's magnitude included (spec §3)."""
        yarn = self.yarn
        magnitude = 1.0 if yarn is None else yarn.magnitude(yarn.mscale_all_dim)
        return self.qk_head_dim**-0.5 * magnitude**2

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts; an MTP layer (id >= L) always has."""
        is_chosen = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return is_chosen or layer >= self.num_hidden_layers

    def moe_layer(self, layer: int) -> int | None:
        """The number of a decoder layer among those with experts, None if it has none."""
        return sum(map(self.is_moe_layer, range(layer))) if self.is_moe_layer(layer) else None

    @property
    def num_moe_layers(self) -> int:
        """Of the main model and of the MTP layers, which come last."""
        num_layers = self.num_hidden_layers + self.num_nextn_predict_layers
        return sum(map(self.is_moe_layer, range(num_layers)))

    def identity(self) -> str:
        """Digest of what shapes cached KV, which must be equal where KV is shared; weights' values
        and the cache's dtype (the layout's business) are no part of it."""
        shape = {name: value for name, value in asdict(self).items() if name not in _NOT_IDENTITY}
        text = json.dumps([_IDENTITY_VERSION, shape], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _one_spelling(raw: JsonObject, generation: JsonObject) -> dict[str, Any]:
    """Fields by their usual names; a null counts as absent, as checkpoints write both."""
    given = _known(raw) | {name: raw[name] for name in ("q_lora_rank",) if name in raw}
    rope = _known(given.pop("rope_scaling", {})) | _known(given.pop("rope_parameters", {}))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        given["rope_scaling"] = rope | {"type": kind}
    if "rope_theta" in rope:
        given.setdefault("rope_theta", rope["rope_theta"])
    ids = _ids(raw) + _ids(generation)
    given["eos_token_id"] = [one for i, one in enumerate(ids) if one not in ids[:i]]
    return (_OF_V2 if raw.get("model_type") == "deepseek_v2" else _OF_V3) | given


def _known(section: Any) -> dict[str, Any]:
    if not isinstance(section, Mapping):
        raise ValueError(f"rope_scaling/rope_parameters = {section!r}: must be an object")
    return {name: value for name, value in section.items() if value not in (None, {})}


def _ids(section: JsonObject) -> list[Any]:
    """A file has one token id, a list of them, or none."""
    value = section.get("eos_token_id", [])
    return value if isinstance(value, list) else [] if value is None else [value]


def _problem(detail: JsonObject) -> str:
    name = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"{name} is missing; take config.json from the checkpoint"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    text = f"{name} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    value = str(detail["input"])
    reasons = [reason for prefix, reason in _REFUSED.items() if value.startswith(prefix)]
    return "; ".join([text, *_REMEDIES.get(detail["loc"][0], reasons)])
