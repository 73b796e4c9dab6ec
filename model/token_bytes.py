"""How much text a token can stand for, where a tokenizer.json allows to say so."""

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_KEEPS_ALL = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def longest_token_bytes(tree: dict[str, Any]) -> int | None:
    """Most bytes of UTF-8 that one token of this tokenizer.json takes from a text.

    None where no number bounds it: something may shorten or drop text before it becomes tokens
    (a normaliser, a pre-tokeniser that removes, truncation, bytes without a token, added tokens
    that swallow spaces), or the tokens are not byte-level BPE.
    """
    model, added = tree["model"], tree["added_tokens"]
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or affixes or tree["truncation"] is not None:
        return None
    if not _is_identity(tree["normalizer"]) or not _is_byte_level(tree["pre_tokenizer"]):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not model["vocab"].keys() >= set(ByteLevel.alphabet()):
        return None
    # A character of a byte-level token is a byte.
    return max(*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added), 1)


def _is_identity(normalizer: dict[str, Any] | None) -> bool:
    return normalizer is None or (
        normalizer["type"] == "Sequence" and all(map(_is_identity, normalizer["normalizers"]))
    )


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether it turns bytes into characters in the end, having dropped nothing."""
    if pre_tokenizer is None:
        return False
    steps = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    kept = all(
        step["type"] in ("ByteLevel", "Digits") or step.get("behavior") in _KEEPS_ALL
        for step in steps
    )
    return kept and any(step["type"] == "ByteLevel" for step in steps)
