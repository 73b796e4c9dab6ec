"""Text to token ids and back, from the checkpoint's own tokenizer.json."""

import json
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from core.json_file import read_json
from text.token_bytes import longest_token_bytes

REPLACEMENT = "\ufffd"
# Tokens looked back at: a character has at most 4 bytes, and a token with text at least one.
_WINDOW = 4


def read_tokenizer(path: Path) -> _Tokenizer | None:
    """The tokenizer.json of a checkpoint folder, None without one. Raises ValueError naming the
    file when it cannot be read."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return _Tokenizer.from_file(str(file))
    except Exception as error:  # what the library raises has no type of its own
        raise ValueError(f"{file}: is not a tokenizer ({error}); download it again") from None


class Tokenizer:
    """Raises ValueError naming the file when tokenizer.json is missing or unreadable."""

    def __init__(self, path: str | Path) -> None:
        found = read_tokenizer(Path(path))
        if found is None:
            file = Path(path) / "tokenizer.json"
            raise ValueError(f"{file}: is missing; give a checkpoint folder with a tokenizer")
        self._tokenizer = found
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}
        self._bos_id = self._find_bos(Path(path) / "tokenizer_config.json")

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Most bytes of text that one token stands for; None where no number bounds it."""
        return longest_token_bytes(json.loads(self._tokenizer.to_str()))

    def encode(self, text: str) -> list[int]:
        """Token ids, the begin-of-sentence token once in front if the checkpoint wants one."""
        ids: list[int] = self._tokenizer.encode(text).ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids`` without special tokens; broken bytes become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def has_text(self, token_id: int) -> bool:
        """False for special tokens, and for ids beyond the vocabulary (padding rows of lm_head)."""
        known = self._tokenizer.id_to_token(token_id) is not None
        return known and token_id not in self._special_ids

    def _find_bos(self, file: Path) -> int | None:
        config = read_json(file)
        token = config.get("bos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if not config.get("add_bos_token", token is not None) or token is None:
            return None
        return self._tokenizer.token_to_id(token)


class TextStream:
    """Text as tokens come; no piece ends inside a character.

    The pieces, with that of ``finish``, join to the text of all tokens. For byte-level BPE, as
    this family uses: the cost of a token does not grow with what came before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_told = 0

    def push(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """The text that became certain with ``token_ids``; "" inside a character."""
        self._ids.extend(i for i in token_ids if self._tokenizer.has_text(i))
        text = self._tokenizer.decode(self._ids)
        piece = text[self._num_told : _num_certain(text)]
        self._ids = self._ids[-_WINDOW:]
        self._num_told = _num_certain(self._tokenizer.decode(self._ids))
        return piece

    def finish(self) -> str:
        """What was held back; call it once, at the end."""
        return self._tokenizer.decode(self._ids)[self._num_told :]


def _num_certain(text: str) -> int:
    """Characters that no later token can change: an unfinished one is a single U+FFFD, last."""
    return len(text) - text.endswith(REPLACEMENT)
