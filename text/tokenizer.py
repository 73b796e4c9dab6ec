"""Tokenizer of a checkpoint folder (tokenizer.json): text to token ids and back.

docs/prompts.md defines how a text becomes token ids.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.models import WordLevel

from tandem.core.errors import TextTooLong
from tandem.core.json_file import read_json
from tandem.text.decoder import read_decoder
from tandem.text.token_bytes import max_token_bytes

_TIKTOKEN = (
    "tiktoken.model cannot be used; convert it with transformers: "
    "convert_tiktoken_to_fast(AutoTokenizer.from_pretrained(folder, trust_remote_code=True).model, "
    "folder), see docs/prompts.md"
)


def read_tokenizer(path: Path) -> _Tokenizer | None:
    """Load tokenizer.json from a checkpoint folder, None if there is no such file.

    Truncation, padding and dropout are switched off. Raises ValueError, which names the file, if
    it cannot be read.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        found = _Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file}: is not a tokenizer ({error}); download it again") from None
    found.no_truncation()
    found.no_padding()
    if getattr(found.model, "dropout", None):
        found.model.dropout = None
    return found


def tokenizer_digest(path: Path) -> str:
    """Return ``Tokenizer.digest`` of a checkpoint folder, "" if it has no tokenizer.json."""
    return Tokenizer(path).digest if (path / "tokenizer.json").is_file() else ""


class Tokenizer:
    """Tokenizer of a checkpoint folder.

    The constructor raises ValueError, which names the file, if a file is missing, unreadable or
    of an unsupported kind.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path)
        file = folder / "tokenizer.json"
        found = read_tokenizer(folder)
        if found is None:
            has_tiktoken = (folder / "tiktoken.model").is_file()
            remedy = _TIKTOKEN if has_tiktoken else "give a checkpoint folder with a tokenizer"
            raise ValueError(f"{file}: is missing; {remedy}")
        self._tokenizer = found
        added = found.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """Ids of special tokens. Text omits these tokens unless the request keeps them."""
        self._prefix_ids = _read_prefix_ids(found, folder)
        try:
            self.new_decoder = read_decoder(found.decoder)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Maximum bytes of UTF-8 text that one token stands for, None if unbounded."""
        return max_token_bytes(json.loads(self._tokenizer.to_str()))

    @cached_property
    def digest(self) -> str:
        """Digest of everything that affects tokenization: 32 hexadecimal digits."""
        content = json.dumps([self._tokenizer.to_str(), self._prefix_ids])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of ``text`` after the prefix tokens of prompts.

        Prefix tokens that the text itself starts with are not repeated. Nothing is appended. The
        batch method of the library is used because only that method releases the GIL.

        Raises:
            TextTooLong: The text has more than ``max_tokens`` tokens, not counting added prefix
                tokens.
        """
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        num_tokens = len(encoding)
        if max_tokens is not None and num_tokens > max_tokens:
            del encoding  # the traceback keeps this frame alive, with about 100 bytes per token
            raise TextTooLong(num_tokens)
        ids: list[int] = encoding.ids
        num_there = max(
            num
            for num in range(len(self._prefix_ids) + 1)
            if tuple(ids[:num]) == self._prefix_ids[:num]
        )
        return [*self._prefix_ids, *ids[num_there:]]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def spelling(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """Return the vocabulary entry of a token, None if the token has no text.

        Special tokens have no text if they are skipped. Ids beyond the vocabulary (padding rows
        of lm_head) never have text.
        """
        token: str | None = self._tokenizer.id_to_token(token_id)
        return None if skip_special_tokens and token in self.special_tokens else token


def _read_prefix_ids(tokenizer: _Tokenizer, folder: Path) -> tuple[int, ...]:
    """Return the prefix tokens of prompts, such as the begin-of-sentence token.

    They are the tokens that the post-processor of tokenizer.json adds. ``add_bos_token: true`` in
    tokenizer_config.json adds the begin-of-sentence token if it is not among them.
    """
    added = _added_by_post_processor(tokenizer)
    file = folder / "tokenizer_config.json"
    config = read_json(file)
    if config.get("add_bos_token") is not True:
        return added
    name = config.get("bos_token") or read_json(folder / "special_tokens_map.json").get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    bos_id = None if name is None else tokenizer.token_to_id(name)
    if bos_id is None and not added:
        raise ValueError(
            f"{file}: add_bos_token is true, but bos_token={name!r} is not a token of "
            "tokenizer.json; name one, or set add_bos_token to false"
        )
    return added if bos_id is None or bos_id in added else (bos_id, *added)


def _added_by_post_processor(tokenizer: _Tokenizer) -> tuple[int, ...]:
    """Return the token ids that the post-processor of tokenizer.json puts before any text."""
    if tokenizer.post_processor is None:
        return ()
    one_token = _Tokenizer(WordLevel({"x": 0}, unk_token="x")).encode("x")
    processed = tokenizer.post_processor.process(one_token)
    return tuple(processed.ids[: processed.special_tokens_mask.index(0)])


class TextStream:
    """Streaming decoder of one answer, whose pieces never end inside a character.

    The concatenated pieces, including that of ``finish``, are the text of all tokens. The cost
    per token does not depend on the number of previous tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._decoder = tokenizer.new_decoder()

    def push(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Append tokens and return the text that became final; "" inside a character."""
        tokens = (
            self._tokenizer.spelling(token_id, skip_special_tokens=self._skips)
            for token_id in token_ids
        )
        return "".join(self._decoder.push(token) for token in tokens if token is not None)

    def finish(self) -> str:
        """Return the text that was held back. Must be called once, after the last token."""
        return self._decoder.finish()
