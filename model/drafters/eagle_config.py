"""The config.json of an EAGLE head, as written by the authors, SpecForge or speculators. Values
that it lacks come from the main model's config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.core.json_file import read_json
from tandem.model.checkpoint.config import USED_KEYS, ModelConfig
from tandem.model.checkpoint.config_keys import QUANTIZATION, ROPE, find_unsupported, normalize_keys

CONFIG = "config.json"
_LATENT_KEYS = (
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "rope_interleave"),
)
_SHARED_KEYS = "rms_norm_eps", "rope_theta", ROPE, "rope_parameters"
_NESTED_SECTIONS = "transformer_layer_config", "eagle_config"
_ONLY_VALUES: dict[str, Any] = {
    "attention_bias": False,
    "fc_norm": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"],
    "layernorms": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "tie_word_embeddings": False,
    "use_aux_hidden_state": True,
}
"""Keys for which only one value is implemented, and that value."""
_HARMLESS = (
    # Redundant, because the tensor names already determine them:
    # https://github.com/SafeAILab/EAGLE/tree/main/eagle/train
    # https://github.com/vllm-project/speculators/blob/main/src/speculators/models/eagle.py
    *("bias", "fusion_bias", "transformer_layer_architecture"),
    # For training and bookkeeping:
    # https://github.com/vllm-project/speculators/blob/main/src/speculators/config.py
    # https://github.com/vllm-project/speculators/blob/main/src/speculators/models/eagle3/config.py
    *("embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init"),
    *("speculators_config", "speculators_version"),
    # Only used together with use_sliding_window: sgl-project/SpecForge, configs.
    "max_window_layers",
)
"""Keys that do not affect what a head computes, in addition to ``HARMLESS`` of config_keys.py."""


class RawEagleConfig(BaseModel):
    """Fields of config.json that are read; some only to reject values that are not implemented."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hidden_size: int
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(default=1, le=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(default=0, ge=0)
    head_dim: int | None = Field(default=None, ge=2, multiple_of=2)
    kv_lora_rank: int | None = None
    vocab_size: int
    draft_vocab_size: int | None = Field(default=None, ge=1)
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    model_type: Literal["llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "eagle"] = "llama"
    speculators_model_type: Literal["eagle", "eagle3"] | None = None
    target_hidden_size: int | None = None

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads; 0 for MLA."""
        return 0 if self.kv_lora_rank else self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Values per attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_outputs(self) -> int:
        """Number of tokens that the head predicts, the draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Configuration of an EAGLE head for one main model.

    Attributes:
        raw_config: The head's config.json.
        model: The main model's config with the head's own norms, RoPE and MLA dimensions.
        taps: Layers of the main model whose inputs are the features. (): its last hidden state.
    """

    raw_config: RawEagleConfig
    model: ModelConfig
    taps: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of values in a cache entry."""
        return (
            2 * self.raw_config.num_kv_heads * self.raw_config.head_width or self.model.latent_dim
        )


def read_config(
    folder: Path, main: Path, has_taps: bool, ignored: tuple[str, ...] = ()
) -> EagleConfig:
    """Read the config of the head in ``folder`` for the checkpoint in ``main``.

    Args:
        folder: Folder of the head.
        main: Folder of the main model's checkpoint.
        has_taps: Whether the features are the inputs of several main-model layers (EAGLE-3).
        ignored: Keys to ignore, ``model.ignore_config_keys``.

    Raises:
        ValueError: A value is wrong or not implemented, or a key is unknown. The message names
            file, key and value.
    """
    file = folder / CONFIG
    main_config = read_json(main / CONFIG)
    if not file.is_file():
        raise ValueError(
            f"{file}: no such file; set speculation.draft_model_path to the folder of a draft head"
        )
    raw = read_json(file)
    for name in _NESTED_SECTIONS:
        inner = raw.get(name) or {}
        if not isinstance(inner, dict):
            raise ValueError(f"{file}: {name} = {inner!r}: must be an object")
        raw = raw | inner
    raw = {name: value for name, value in raw.items() if value is not None}
    for name, value in _ONLY_VALUES.items():
        if raw.get(name, value) != value:
            raise ValueError(
                f"{file}: {name} = {raw[name]!r}: is not implemented; use a head with {value!r}"
            )
    try:
        raw_config = RawEagleConfig(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {name} = {raw.get(name)!r}: {first['msg']}") from None
    _check(file, raw_config, main_config)
    if problems := list(
        find_unsupported(normalize_keys(raw), _known_keys() - set(ignored), ignored)
    ):
        raise ValueError("\n".join(f"{file}: {problem}" for problem in problems))
    is_grouped = raw_config.num_kv_heads > 0
    names = _SHARED_KEYS if is_grouped else _SHARED_KEYS + _LATENT_KEYS
    head_keys: dict[str, Any] = {name: raw[name] for name in names if name in raw}
    if is_grouped:
        head_keys["qk_rope_head_dim"] = raw_config.head_width
    head_values = normalize_keys(head_keys).values
    has_section = any(key.startswith(f"{ROPE}.") for key in head_values)
    dropped = "rope_" if is_grouped else f"{ROPE}." if has_section else "none of them"
    rest = {"rope_theta": 10000.0} | {
        key: value
        for key, value in normalize_keys(main_config).values.items()
        if key in USED_KEYS and dropped not in key
    }
    rest = {key: value for key, value in rest.items() if key not in head_values}
    model = ModelConfig.from_dict(rest | head_keys, origin=str(file), ignored=ignored)
    num_layers = model.num_hidden_layers
    taps = raw_config.eagle_aux_hidden_state_layer_ids or (2, num_layers // 2, num_layers - 3)
    if has_taps and (len(taps) < 2 or not all(0 <= tap < num_layers for tap in taps)):
        raise ValueError(
            f"{file}: eagle_aux_hidden_state_layer_ids = {[*taps]}: list two or more "
            f"layers, from 0 to {num_layers - 1}; the head reads their inputs"
        )
    return EagleConfig(raw_config, model, taps if has_taps else ())


def _check(file: Path, raw_config: RawEagleConfig, main_config: dict[str, Any]) -> None:
    expected = main_config | {"target_hidden_size": main_config["hidden_size"]}
    for name in ("hidden_size", "vocab_size", "target_hidden_size"):
        if getattr(raw_config, name) not in (None, expected[name]):
            raise ValueError(
                f"{file}: {name} = {getattr(raw_config, name)}, but the model has "
                f"{expected[name]}; use a head that was trained for it"
            )
    num = raw_config.num_attention_heads
    num_kv = raw_config.num_key_value_heads
    if num_kv and num % num_kv:
        raise ValueError(
            f"{file}: num_key_value_heads = {num_kv}: must divide num_attention_heads = {num}"
        )


def _known_keys() -> set[str]:
    """Return the keys that a head's config.json may have: those read here, harmless ones, and those
    of checkpoints. The latter need no check of their own, because a head whose tensors do not fit
    is refused."""
    of_checkpoint = {key for key in USED_KEYS if not key.startswith(QUANTIZATION)}
    return of_checkpoint.union(
        RawEagleConfig.model_fields, _NESTED_SECTIONS, _ONLY_VALUES, _HARMLESS
    )
