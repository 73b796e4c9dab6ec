"""Maximum length of the text that one token of a tokenizer.json can stand for."""

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_LOSSLESS_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def max_token_bytes(tree: dict[str, Any]) -> int | None:
    """Return the maximum bytes of UTF-8 text that one token stands for, None if unbounded.

    There is a bound only for byte-level BPE that drops no text before tokenization. These may drop
    text: normalizers, some pre-tokenizers, bytes without a token, and added tokens that strip
    spaces.

    Args:
        tree: Content of tokenizer.json, without truncation.
    """
    model = tree["model"]
    added = tree["added_tokens"]
    is_whole = (
        (tree["normalizer"] is None or tree["normalizer"].get("normalizers") == [])
        and _is_byte_level(tree["pre_tokenizer"] or {})
        and model["type"] == "BPE"
        and not (model["continuing_subword_prefix"] or model["end_of_word_suffix"])
        and model["vocab"].keys() >= set(ByteLevel.alphabet())
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not is_whole:
        return None
    # Each character of a byte-level token stands for one byte.
    return max(*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added))


def _is_byte_level(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether the pre-tokenizer maps bytes to characters and drops no text."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    is_every_byte_kept = all(
        step.get("type") in ("ByteLevel", "Digits") or step.get("behavior") in _LOSSLESS_BEHAVIORS
        for step in steps
    )
    return is_every_byte_kept and any(step["type"] == "ByteLevel" for step in steps)
