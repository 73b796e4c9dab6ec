"""End-of-sequence tokens, from any file of a checkpoint that names them."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tandem.core.json_file import read_json
from tandem.text.tokenizer import read_tokenizer

log = logging.getLogger(__name__)
_BY_TEXT = ("tokenizer_config.json", "special_tokens_map.json")


def read_eos(folder: Path, config: dict[str, Any]) -> list[Any]:
    """Return the end-of-sequence ids of config.json and generation_config.json.

    If none of them is in the vocabulary, return the ids of the end-of-sequence texts in
    tokenizer_config.json and special_tokens_map.json.
    """
    generation = read_json(folder / "generation_config.json")
    size = config.get("vocab_size")
    values = config.get("eos_token_id"), generation.get("eos_token_id")
    ids = usable_ids(values, size, folder) or usable_ids(_ids_of_texts(folder), size, folder)
    if not ids:
        log.warning("%s: no file names an end-of-sequence token; answers end at max_tokens", folder)
    return ids


def usable_ids(values: Iterable[Any], vocab_size: Any, origin: object) -> list[Any]:
    """Return the distinct ids in ``values``. Each value is an id, a list of ids or None.

    Ids outside the vocabulary are dropped with a warning.
    """
    lists = [value if isinstance(value, list) else [value] for value in values]
    ids = [token_id for listed in lists for token_id in listed if token_id is not None]
    are_numbers = type(vocab_size) is int and all(type(token_id) is int for token_id in ids)
    beyond = [token_id for token_id in ids if are_numbers and not 0 <= token_id < vocab_size]
    if beyond:
        log.warning(
            "%s: eos_token_id %s ignored: not in the vocabulary of %s tokens",
            origin,
            beyond,
            vocab_size,
        )
    return [
        token_id
        for i, token_id in enumerate(ids)
        if token_id not in ids[:i] and token_id not in beyond
    ]


def _ids_of_texts(folder: Path) -> list[int | None]:
    tokens = [read_json(folder / name).get("eos_token") for name in _BY_TEXT]
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    tokenizer = read_tokenizer(folder) if any(texts) else None
    return [tokenizer.token_to_id(text) for text in texts if isinstance(text, str) and tokenizer]
