"""How much text a token can stand for, where a tokenizer.json allows to say so."""

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_LOSSLESS_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def max_token_bytes(tree: dict[str, Any]) -> int | None:
    """Most bytes of UTF-8 that one token of this tokenizer.json takes from a text.

    None where no number bounds it: something may shorten or drop text before it becomes tokens
    (a normaliser, a pre-tokeniser that removes, bytes without a token, added tokens that swallow
    spaces), or the tokens are not byte-level BPE. Truncation is switched off.
    """
    model, added = tree["model"], tree["added_tokens"]
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
    # A character of a byte-level token is a byte.
    return max(*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added))


def _is_byte_level(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether it turns bytes into characters in the end, having dropped nothing."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kept = all(
        step.get("type") in ("ByteLevel", "Digits") or step.get("behavior") in _LOSSLESS_BEHAVIORS
        for step in steps
    )
    return kept and any(step["type"] == "ByteLevel" for step in steps)
