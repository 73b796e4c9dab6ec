"""Streaming decoders, which turn tokens into text one at a time.

The ``tokenizers`` library decodes whole lists only. The concatenated output of a streaming decoder
equals the text that the library returns for the whole list. The decoder that tokenizer.json names
determines which streaming decoder is used.
"""

import codecs
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tokenizers.decoders import Decoder as _Decoder

REPLACEMENT_CHAR = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_UNSHIFTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_SHIFTED = tuple(byte for byte in range(0x100) if byte not in _UNSHIFTED)
_BYTE_OF = {chr(byte): byte for byte in _UNSHIFTED} | {
    chr(0x100 + i): byte for i, byte in enumerate(_SHIFTED)
}
"""The byte that each character of a byte-level token stands for (GPT-2's alphabet)."""
_REMEDY = "use ByteLevel, or the sequence Replace, ByteFallback, Fuse, Strip (at the start)"


class TextDecoder(Protocol):
    """Streaming decoder of one text, fed with one token at a time."""

    def push(self, token: str) -> str:
        """Add a token and return the new text that no later token can change."""

    def finish(self) -> str:
        """End the text and return the rest of it."""


class ByteLevelDecoder:
    """Decoder for byte-level tokens. Bytes that are not valid UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        """Add a token and return the text of all characters that it completes."""
        try:
            spelled = bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:  # added tokens are plain text
            spelled = token.encode()
        return self._utf8.decode(spelled)

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, otherwise ""."""
        return self._utf8.decode(b"", final=True)


class ByteFallbackDecoder:
    """Decoder for tokens that are text, with byte tokens such as ``<0xE4>``.

    A run of byte tokens becomes text if all of it is valid UTF-8, otherwise one U+FFFD per byte, as
    in the ``tokenizers`` library. A run is therefore held back until it ends.

    Args:
        replaced: Pairs of a string to replace in each token and its replacement.
        stripped: Character to remove at the start of the text.
        num_stripped: Maximum number of these characters to remove.
    """

    def __init__(
        self, replaced: tuple[tuple[str, str], ...], stripped: str, num_stripped: int
    ) -> None:
        self._replaced = replaced
        self._stripped = stripped
        self._num_left = num_stripped
        self._run = bytearray()

    def push(self, token: str) -> str:
        """Add a token and return the new text; "" inside a run of byte tokens."""
        for old, new in self._replaced:
            token = token.replace(old, new)
        if byte := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(byte[1], 16))
            return ""
        return self._strip(self._end_run() + token)

    def finish(self) -> str:
        """Return the text of the run of byte tokens that the text ends with."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT_CHAR * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        head = text[: self._num_left]
        stripped = head.lstrip(self._stripped)
        self._num_left = 0 if stripped else self._num_left - len(head)
        return stripped + text[len(head) :]


def read_decoder(whole: _Decoder | None) -> Callable[[], TextDecoder]:
    """Return a factory of streaming decoders that are equivalent to ``whole``.

    Raises ValueError if ``whole`` is a kind of decoder that cannot be streamed.
    """
    section: dict[str, Any] = {} if whole is None else json.loads(whole.__getstate__())
    steps = section.get("decoders", [section])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder
    replaces = [step for step in steps if step.get("type") == "Replace"]
    strip: dict[str, Any] = (
        steps[-1] if kinds[-1:] == ["Strip"] else {"content": " ", "start": 0, "stop": 0}
    )
    order = [*["Replace"] * len(replaces), "ByteFallback", "Fuse"]
    is_known = kinds in (order, [*order, "Strip"]) and strip["stop"] == 0
    if not is_known or any("String" not in step["pattern"] for step in replaces):
        raise ValueError(
            f"decoder={section or None}: answers cannot be streamed with this decoder; {_REMEDY}"
        )
    replaced = tuple((step["pattern"]["String"], step["content"]) for step in replaces)
    return partial(ByteFallbackDecoder, replaced, strip["content"], strip["start"])
