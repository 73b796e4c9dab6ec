"""The checkpoint's own description of the network: config.json, read and checked once.

Field names and meanings are those of DeepSeek's config.json (spec deepseek_v3.md §1, §10). This
module imports no torch: the gateway uses it too.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model import config_sections as sections
from model.config_fields import Fields, read_json
from model.config_sections import Fp8Blocks, YarnScaling

__all__ = ["Fp8Blocks", "ModelConfig", "YarnScaling"]

_ROUTINGS = (("sigmoid", "noaux_tc"), ("softmax", "greedy"), ("softmax", "group_limited_greedy"))
# A different cache format or different arithmetic must never meet this one: raise the number.
_IDENTITY_VERSION = 1
# What does not change a single cached value: two nodes may differ in it.
_NOT_IDENTITY = ("bos_token_id", "eos_token_ids", "torch_dtype", "quantization")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V3-family model. Fields are named as in config.json; counts and widths, no units.

    `num_hidden_layers` (L) leaves out the `num_nextn_predict_layers` MTP layers, whose layer ids
    are L, L+1, ... `q_lora_rank` None means one q_proj. `lora_norm_eps` is the eps of
    q_a_layernorm and kv_a_layernorm: 1e-6 whatever rms_norm_eps says (spec §3).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    yarn: YarnScaling | None = None
    quantization: Fp8Blocks | None = None
    lora_norm_eps: float = 1e-6

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """The config of the checkpoint in folder `path` (config.json, generation_config.json).

        Raises:
            ValueError: config.json is missing, is not JSON, or has a field that is missing, wrong
                or beyond what Tandem serves; the message names file, field, value and remedy.
        """
        folder = Path(path)
        file = folder / "config.json"
        extra = folder / "generation_config.json"
        generation = read_json(extra) if extra.is_file() else {}
        return cls.from_dict(read_json(file), generation, origin=str(file))

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, origin: str = ""
    ) -> "ModelConfig":
        """As `from_dir`, from the parsed files; `origin` is the file named in errors."""
        fields = Fields(raw, origin or "config.json")
        model_type = sections.model_type(fields)
        sections.refuse_unsupported(fields)
        old = model_type == "deepseek_v2"
        config = cls(
            model_type=model_type,
            **{name: fields.integer(name) for name in _WIDTHS},
            num_nextn_predict_layers=sections.num_mtp_layers(fields),
            q_lora_rank=fields.optional_integer("q_lora_rank") or None,
            first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0),
            moe_layer_freq=fields.integer("moe_layer_freq", default=1),
            n_shared_experts=fields.integer("n_shared_experts", default=0, minimum=0),
            n_group=fields.integer("n_group", default=1),
            topk_group=fields.integer("topk_group", default=1),
            # Transformers writes neither field for V3: there, they are the architecture's.
            scoring_func=fields.text("scoring_func", "softmax" if old else "sigmoid"),
            topk_method=fields.text("topk_method", "greedy" if old else "noaux_tc"),
            norm_topk_prob=fields.boolean("norm_topk_prob", False if old else None),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=sections.rope_fields(fields).number("rope_theta"),
            rope_interleave=fields.boolean("rope_interleave", True),
            attention_bias=False,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            bos_token_id=fields.token_id("bos_token_id"),
            eos_token_ids=sections.eos_token_ids(fields, generation or {}),
            torch_dtype=fields.text("dtype" if "dtype" in raw else "torch_dtype", "bfloat16"),
            yarn=sections.yarn(fields),
            quantization=sections.quantization(fields),
        )
        _check_together(config, fields)
        return config

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by, YaRN's magnitude included (spec §3)."""
        magnitude = 1.0
        if self.yarn is not None and self.yarn.mscale_all_dim:
            magnitude = self.yarn.magnitude(self.yarn.mscale_all_dim)
        return self.qk_head_dim**-0.5 * magnitude**2

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts; an MTP layer (id >= L) always has."""
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def identity(self) -> str:
        """Digest of everything that shapes cached KV: two nodes that share KV must have it equal.

        It says nothing of the weights' values, nor of the cache's dtype (the layout's business).
        """
        shape = {name: value for name, value in asdict(self).items() if name not in _NOT_IDENTITY}
        text = json.dumps([_IDENTITY_VERSION, shape], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_WIDTHS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
]


def _check_together(config: ModelConfig, fields: Fields) -> None:
    """What no field says alone."""
    if (config.scoring_func, config.topk_method) not in _ROUTINGS:
        known = ", ".join("/".join(pair) for pair in _ROUTINGS)
        got = f"{config.scoring_func}/{config.topk_method}"
        raise fields.error("scoring_func/topk_method", f"unknown routing; known: {known}", got)
    if config.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "must be even: rope turns pairs")
    if config.n_routed_experts % config.n_group:
        raise fields.error("n_group", f"must divide n_routed_experts = {config.n_routed_experts}")
    per_group = config.n_routed_experts // config.n_group
    if config.topk_method == "noaux_tc" and config.n_group > 1 and per_group < 2:
        raise fields.error("n_group", "each group needs two experts or more (its score sums two)")
    if not 1 <= config.topk_group <= config.n_group:
        raise fields.error("topk_group", f"must be within 1..n_group = {config.n_group}")
    eligible = per_group * config.topk_group
    if config.num_experts_per_tok > eligible:
        raise fields.error("num_experts_per_tok", f"must be <= the {eligible} experts eligible")
    if config.first_k_dense_replace > config.num_hidden_layers:
        most = config.num_hidden_layers
        raise fields.error("first_k_dense_replace", f"must be <= num_hidden_layers = {most}")
    for name, ids in (
        ("bos_token_id", (config.bos_token_id,)),
        ("eos_token_id", config.eos_token_ids),
    ):
        if any(i is not None and i >= config.vocab_size for i in ids):
            raise fields.error(name, f"must be < vocab_size = {config.vocab_size}", ids)
