"""The parts of config.json that are more than one field: type, rope scaling, quantisation, eos."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config_fields import Fields

SUPPORTED_MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")
_REFUSED_MODEL_TYPES = {
    "deepseek_v32": "it needs the sparse-attention (DSA) indexer, which Tandem does not have",
    "deepseek_v4": "it is a different architecture (compressed KV, hyper-connections)",
    "glm": "GLM is another family, even where its attention is MLA",
    "kimi_k25": "it nests a vision model around its int4 text model",
}


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's parameters, as in config.json's rope_scaling (spec §3)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def magnitude(self, scale: float) -> float:
        """m(factor, scale): 1 for factor <= 1, else 0.1 * scale * ln(factor) + 1 (spec §3)."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by: m(factor, mscale) / m(factor, mscale_all_dim)."""
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Weights stored as float8_e4m3fn with one fp32 scale per block (rows, columns) (spec §6)."""

    block_size: tuple[int, int]


def model_type(fields: Fields) -> str:
    name = fields.text("model_type")
    if name in SUPPORTED_MODEL_TYPES:
        return name
    for prefix, reason in _REFUSED_MODEL_TYPES.items():
        if name.startswith(prefix):
            raise fields.error("model_type", f"not served: {reason}")
    raise fields.error("model_type", f"unknown; Tandem serves {', '.join(SUPPORTED_MODEL_TYPES)}")


def refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "only silu is implemented")
    for name in ("attention_bias", "mlp_bias"):
        if fields.boolean(name, False):
            raise fields.error(name, "linear layers with bias are not implemented; must be false")


def num_mtp_layers(fields: Fields) -> int:
    alias = fields.raw.get("num_mtp_layers") is not None
    name = "num_mtp_layers" if alias else "num_nextn_predict_layers"
    return fields.integer(name, default=0, minimum=0)


def eos_token_ids(fields: Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    extra = Fields(generation, "generation_config.json")
    both = fields.token_ids("eos_token_id") + extra.token_ids("eos_token_id")
    return tuple(dict.fromkeys(both))


def rope_fields(fields: Fields) -> Fields:
    """rope_theta and the scaling's fields, whichever of the two layouts config.json has (§1)."""
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        scaling |= fields.section(name)
    if fields.raw.get("rope_theta") is not None:
        scaling["rope_theta"] = fields.raw["rope_theta"]
    return Fields(scaling, fields.origin)


def yarn(fields: Fields) -> YarnScaling | None:
    rope = rope_fields(fields)
    name = "rope_type" if rope.raw.get("rope_type") is not None else "type"
    kind = rope.text(name, "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise rope.error(name, "unknown rope scaling; only yarn and default are implemented")
    if rope.raw.get("attention_factor") is not None or rope.raw.get("truncate") is False:
        raise rope.error("rope_scaling", "attention_factor and truncate=false are not implemented")
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 1.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, minimum=0.0),
    )


def quantization(fields: Fields) -> Fp8Blocks | None:
    """How the checkpoint's linear weights are stored; None: as plain floats."""
    section = fields.section("quantization_config")
    if not section:
        return None
    inner = Fields(section, fields.origin)
    if inner.text("quant_method") != "fp8" or inner.text("fmt", "e4m3") != "e4m3":
        fields_named = {name: section.get(name) for name in ("quant_method", "fmt")}
        raise fields.error("quantization_config", _QUANTIZATION_REMEDY, fields_named)
    size = section.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int for n in size):
        raise inner.error("weight_block_size", "must be [rows, columns], such as [128, 128]")
    if min(size) < 1:
        raise inner.error("weight_block_size", "both numbers must be at least 1")
    return Fp8Blocks((size[0], size[1]))


_QUANTIZATION_REMEDY = (
    "only DeepSeek's fp8 (e4m3, block scales) is read; bring the bf16 or fp8 checkpoint instead"
)
