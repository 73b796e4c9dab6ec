"""Text to token ids and back, from the checkpoint's own tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from model.chat import ChatTemplate

REPLACEMENT = "\ufffd"


class Tokenizer:
    """Raises ValueError naming the file when tokenizer.json is missing or unreadable."""

    def __init__(self, path: str | Path) -> None:
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file}: is missing; give a checkpoint folder with a tokenizer")
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"{file}: is not a tokenizer ({error}); download it again") from None
        config = _read_json(Path(path) / "tokenizer_config.json")
        self._bos_id = self._find_bos(config)
        self._chat = ChatTemplate.from_dir(Path(path), config)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids, the begin-of-sentence token once in front if the checkpoint wants one."""
        ids: list[int] = self._tokenizer.encode(text).ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation ({role, content} each) by the checkpoint's template.

        Raises ValueError when it has none, or the template refuses the messages.
        """
        if self._chat is None:
            raise ValueError("chat: this checkpoint has no chat template; send text instead")
        return self._tokenizer.encode(self._chat.render(messages), add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids`` without special tokens; broken bytes become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _find_bos(self, config: dict[str, Any]) -> int | None:
        token = config.get("bos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if not config.get("add_bos_token", token is not None) or token is None:
            return None
        return self._tokenizer.token_to_id(token)


class TextStream:
    """Text as tokens come; no piece ends inside a character.

    The pieces, with that of ``finish``, join to the text of all tokens. Only the tokens since
    the last complete piece are decoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_told = 0

    def push(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """The text that became certain with ``token_ids``; "" inside a character."""
        self._ids.extend(token_ids)
        text, told = self._window()
        if len(text) <= len(told) or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._num_told :]
        self._num_told = len(self._ids)
        return text[len(told) :]

    def finish(self) -> str:
        """What was held back; call it once, at the end."""
        text, told = self._window()
        return text[len(told) :]

    def _window(self) -> tuple[str, str]:
        """Text of all kept tokens, and of those among them that were told already."""
        decode = self._tokenizer.decode
        return decode(self._ids), decode(self._ids[: self._num_told])


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds {type(content).__name__}, expected an object")
    return content
